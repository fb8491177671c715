"""Loads of sessions from the keys of a workload: who reads them, by which rules they are played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtune.base.errors import UsageError
from kvtune.requests.loads.sessions import Load, Rules, as_recorded, closed_loops, load
from kvtune.requests.types import Draft

RULES = ("sessions", "hours", "max_think", "longest", "answers", "share", "subagents", "sources")
"""Keys of how sessions are played, beside those of what is read; and who reads them (sources.py)."""
WEKA = "weka"


def trace_draft(values: Mapping[str, Any]) -> Draft:
    if values["sessions"] or _is_weka(values):
        return _drafted(trace_load(values), values)
    from kvtune.requests.loads.trace_file import trace

    return trace(**{name: value for name, value in values.items() if name not in RULES})


def log_draft(values: Mapping[str, Any]) -> Draft:
    if values["sessions"]:
        return _drafted(log_load(values), values)
    from kvtune.requests.loads.requests_file import requests

    without_rules = {name: value for name, value in values.items() if name not in RULES}
    return requests(**without_rules, sources=values["sources"])


def agents_draft(values: Mapping[str, Any]) -> Draft:
    return _drafted(agents_load(values), values)


def _is_weka(values: Mapping[str, Any]) -> bool:
    named = values["format"]
    return bool(named == WEKA or (named == "auto" and Path(values["path"]).expanduser().is_dir()))


def _drafted(load: Load, values: Mapping[str, Any]) -> Draft:
    """Return the requests of N slots, or with sessions=0 each session once."""
    if not values["sessions"]:
        return as_recorded(load, values["concurrency"])
    draft = closed_loops(load, values["sessions"], values["hours"] * 3600, values["seed"])
    return replace(draft, concurrency=values["concurrency"] or None)


def trace_load(values: Mapping[str, Any]) -> Load:
    file = Path(values["path"]).expanduser()
    if not _is_weka(values):
        from kvtune.requests.loads.log_sessions import trace_sessions

        sessions, note = trace_sessions(
            file,
            values["format"],
            limit=values["limit"],
            from_s=values["from_s"],
            to_s=values["to_s"],
            sort=bool(values["sort"]),
        )
        return load(sessions, _rules(values, share=True), str(file), note)
    from kvtune.requests.loads.weka import files_of

    for name, text in (("from_s", "from"), ("to_s", "to"), ("sort", "sort")):
        if values[name]:
            raise UsageError(
                f"workload trace: {text}= is for a trace with times of arrival, and a folder of sessions has none",
                "limit=N takes the first N sessions",
            )
    sessions = values["sources"].recorded(files_of(file, values["limit"]))
    return load(sessions, _rules(values, share=False), str(file))


def log_load(values: Mapping[str, Any]) -> Load:
    from kvtune.requests.loads.log_sessions import log_sessions

    file = Path(values["path"]).expanduser()
    render = values["sources"].render(values["tokenizer"])
    sessions, note = log_sessions(
        file, render, limit=values["limit"], since=values["since"], until=values["until"]
    )
    return load(sessions, _rules(values, share=True), str(file), note)


def agents_load(values: Mapping[str, Any]) -> Load:
    from kvtune.requests.loads.agents import Medians, agents

    medians = Medians(
        turns=values["turns"],
        context=values["context"],
        tools=values["tools"],
        output=values["output"],
        think=values["think"],
        window=values["window"],
        subagents=values["subagents"],
    )
    drawn = agents(
        values["different"], medians, 0
    )  # the same sessions with every seed, which decides who plays which
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
