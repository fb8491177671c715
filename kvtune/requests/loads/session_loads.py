"""Loads of sessions from the keys of a workload: who reads them, by which rules they are played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvtune.base.errors import UsageError
from kvtune.requests.loads import requests_file, trace_file
from kvtune.requests.loads.agents import Medians, agents
from kvtune.requests.loads.log_sessions import log_sessions, trace_sessions
from kvtune.requests.loads.sessions import Load, Rules, as_recorded, closed_loops, load
from kvtune.requests.loads.weka import files_of
from kvtune.requests.log.logged import Logged
from kvtune.requests.types import Draft

WEKA = "weka"


def trace_draft(values: Mapping[str, Any]) -> Draft:
    if values["sessions"] or _is_weka(values):
        return _drafted(trace_load(values), values)
    return trace_file.draft(*_trace(values), speed=values["speed"], concurrency=values["concurrency"])


def log_draft(values: Mapping[str, Any]) -> Draft:
    if values["sessions"]:
        return _drafted(log_load(values), values)
    rows = _log(values)
    if values["routed"] and not (rows := [row for row in rows if row.replica]):
        raise UsageError(f"{_file(values)} has no line that names its `replica`", "leave out routed=1")
    return requests_file.draft(rows, speed=values["speed"], concurrency=values["concurrency"])


def _file(values: Mapping[str, Any]) -> Path:
    return Path(values["path"]).expanduser()


def _trace(values: Mapping[str, Any]) -> tuple[trace_file.Rows, list[str]]:
    """Return the chosen rows of a trace, and what it does not say."""
    ends = {"from_s": values["from"], "to_s": values["to"]}
    return trace_file.window(
        _file(values), values["format"], limit=values["limit"], sort=bool(values["sort"]), **ends
    )


def _log(values: Mapping[str, Any]) -> list[Logged]:
    """Return the chosen requests of a log."""
    chosen = {name: values[name] for name in ("limit", "since", "until")}
    return requests_file.selected(_file(values), values["sources"].render(values["tokenizer"]), **chosen)


def agents_draft(values: Mapping[str, Any]) -> Draft:
    return _drafted(agents_load(values), values)


def _is_weka(values: Mapping[str, Any]) -> bool:
    named = values["format"]
    return bool(named == WEKA or (named == "auto" and _file(values).is_dir()))


def _drafted(load: Load, values: Mapping[str, Any]) -> Draft:
    """Return the requests of N slots, or with sessions=0 each session once."""
    if not values["sessions"]:
        return as_recorded(load, values["concurrency"])
    draft = closed_loops(load, values["sessions"], values["hours"] * 3600, values["seed"])
    return replace(draft, concurrency=values["concurrency"] or None)


def trace_load(values: Mapping[str, Any]) -> Load:
    file = _file(values)
    if not _is_weka(values):
        sessions, note = trace_sessions(file, *_trace(values))
        return load(sessions, _rules(values, share=True), str(file), note)
    for name in ("from", "to", "sort"):
        if values[name]:
            raise UsageError(
                f"workload trace: {name}= is for a trace with times of arrival, and a folder of sessions has none",
                "limit=N takes the first N sessions",
            )
    sessions = values["sources"].recorded(files_of(file, values["limit"]))
    return load(sessions, _rules(values, share=False), str(file))


def log_load(values: Mapping[str, Any]) -> Load:
    sessions, note = log_sessions(_file(values), _log(values))
    return load(sessions, _rules(values, share=True), str(_file(values)), note)


def agents_load(values: Mapping[str, Any]) -> Load:
    medians = Medians(**{each.name: values[each.name] for each in fields(Medians)})
    # The same sessions with every seed, which decides who plays which.
    drawn = agents(values["different"], medians, 0)
    return load(drawn, _rules({**values, "subagents": 1}, share=True), "agents")


def _rules(values: Mapping[str, Any], *, share: bool) -> Rules:
    return Rules(
        max_think=values["max_think"],
        longest=values["longest"],
        answers=values["answers"] == "engine",
        share=values["share"] == "yes" or (values["share"] == "auto" and share),
        subagents=bool(values["subagents"]),
        speed=values["speed"],
    )
