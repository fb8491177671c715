"""Loads that are wrong, by each reader: file, place and field; and the commands that read loads.

Nothing starts for them: the load is read before any simulator.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.cli.app import run
from kvtune.data.run.file import write_run
from kvtune.requests.loads.spec import build
from tests.golden.synthetic import partial_run
from tests.recorded_sessions import asked, unpacked, written

COMMANDS: dict[str, tuple[str, ...]] = {
    "bounds": ("bounds", "-w"),
    "capacity": ("capacity", "tiny-llama", "-w"),
    "profile on sim": ("profile", "tiny-llama", "--on", "sim", "-w"),
}
Made = tuple[str, list[str]]
"""The workload, and what the error must name."""


def weka(change: Callable[[dict[str, Any]], Any] = lambda one: None, **fields: Any) -> Callable[[Path], Made]:
    """A folder with a good session and one whose second request is changed."""

    def made(folder: Path) -> Made:
        good = [asked(0, 64, range(1)), asked(5, 192, range(3), think_time=2.0)]
        written(folder / "w", good, "good")
        wrong = [asked(0, 64, range(1)), asked(5, 192, range(3), think_time=2.0)]
        change(wrong[1])
        file = written(folder / "w", wrong, "wrong", **fields)
        return f"trace:format=weka,path={folder / 'w'}", [str(file)]

    return made


def lines(
    kind: str, good: dict[str, Any], change: Callable[[dict[str, Any]], Any], *, torn: bool = False
) -> Callable[[Path], Made]:
    """A file with a good line and a changed one; of kvtune's own log the changed one alone: else it is left out."""

    def made(folder: Path) -> Made:
        wrong = json.loads(json.dumps(good))
        change(wrong)
        file = folder / "lines.jsonl"
        text = json.dumps(wrong)
        first = "" if good.get("by") == "kvtune tap" else json.dumps(good)
        file.write_text(f"{first}\n{text[: len(text) // 2] if torn else text}\n")
        return f"{kind}:path={file},sessions=2", [str(file), "line 2"]

    return made


def named(made: Callable[[Path], Made], *more: str) -> Callable[[Path], Made]:
    def both(folder: Path) -> Made:
        spec, names = made(folder)
        return spec, [*names, *more]

    return both


def weka_backwards(folder: Path) -> Made:
    requests = [asked(5, 64, range(1)), asked(3, 192, range(3))]
    return f"trace:path={folder / 'w'}", [str(written(folder / "w", requests, "wrong"))]


def empty(folder: Path) -> Made:
    return f"trace:format=weka,path={folder}", [str(folder), "no .json file"]


def one_torn_of_31(folder: Path) -> Made:
    place = unpacked(folder)
    file = sorted(place.glob("*.json"))[17]
    file.write_bytes(file.read_bytes()[:5000])
    return f"trace:path={place}", [str(file), "torn"]


def too_long(folder: Path) -> Made:
    written(folder / "w", [asked(0, 6400, range(100))], "long")
    return f"trace:path={folder / 'w'},longest=100", [str(folder / "w"), "100 tokens"]


def run_file(kind: str, keys: str = "") -> Callable[[Path], Made]:
    def made(folder: Path) -> Made:
        file = folder / "server.kvrun"
        write_run(partial_run(), file)
        return f"{kind}:path={file}{keys}", [str(file), "run file", "no prompts", "kvtune tap"]

    return made


MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
OPENAI = {
    "body": {"prompt": [1, 2, 3], "max_tokens": 4},
    "response": {"body": {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}},
    "t0": 1764100000.5,
    "t1": 1764100001.5,
}
TAPPED = {
    "by": "kvtune tap",
    "name": "kvtune-1",
    "t0": 1764100000.5,
    "t1": 1764100001.5,
    "ttft": 0.2,
    "hit": 0,
    "usage": {"prompt_tokens": 3},
    "prompt_token_ids": [1, 2, 3],
    "answer": [4, 5],
}
NAN, INF = float("nan"), float("inf")


def having(field: str, value: object) -> Callable[[dict[str, Any]], Any]:
    return lambda one: one.update({field: value})


def of_log(good: dict[str, Any]) -> dict[str, Callable[[Path], Made]]:
    """What may be wrong in each log of requests."""
    times = {
        "below zero": -1.0,
        "NaN": NAN,
        "Infinity": INF,
        "huge": 1e300,
        "no float": 10**400,
        "text": "yesterday",
    }
    found = {
        f"{field} {how}": named(lines("requests", good, having(field, value)), field)
        for field in ("t0", "t1")
        for how, value in times.items()
    }
    found["answered before it was sent"] = named(
        lines("requests", good, lambda one: one.update(t1=one["t0"] - 5)), "t0", "t1"
    )
    found["no time of sending"] = named(lines("requests", good, lambda one: one.pop("t0")), "t0")
    found["ttft below zero"] = named(lines("requests", good, lambda one: one.update(ttft=-1)), "ttft")
    found["hits below zero"] = named(lines("requests", good, lambda one: one.update(hit=-5)), "hit")
    found["a token below zero"] = named(
        lines("requests", good, lambda one: one.update(answer=[4, -5])), "answer"
    )
    found["torn"] = named(lines("requests", good, lambda one: None, torn=True), "torn")
    return found


def of_trace(good: dict[str, Any]) -> dict[str, Callable[[Path], Made]]:
    """What may be wrong in each trace of Mooncake's format."""
    changes: dict[str, tuple[str, object]] = {
        "time below zero": ("timestamp", -1),
        "time NaN": ("timestamp", NAN),
        "time Infinity": ("timestamp", INF),
        "huge time": ("timestamp", 1e300),
        "no tokens": ("input_length", 0),
        "tokens below zero": ("output_length", -1),
        "huge prompt": ("input_length", 1 << 40),
        "too few ids": ("hash_ids", [0]),
        "too many ids": ("hash_ids", [0, 1, 2, 3]),
        "an id below zero": ("hash_ids", [0, 1, -2]),
        "tokens as text": ("input_length", "5"),
        "part of a token": ("input_length", 1.5),
    }
    found = {
        how: named(lines("trace", good, having(field, value)), field)
        for how, (field, value) in changes.items()
    }
    found["a field is missing"] = named(
        lines("trace", good, lambda one: one.pop("output_length")), "output_length"
    )
    found["torn"] = lines("trace", good, lambda one: None, torn=True)
    return found


WEKA = {
    "unknown field": named(weka(lambda one: one.update(speed=1)), "speed", "requests[1]"),
    "unknown field of the session": named(weka(weight=3), "weight"),
    "think time below zero": named(
        weka(lambda one: one.update(think_time=-1.0)), "think_time", "requests[1]"
    ),
    "think time NaN": named(weka(lambda one: one.update(think_time=NAN)), "think_time", "requests[1]"),
    "think time Infinity": named(weka(lambda one: one.update(think_time=INF)), "think_time", "requests[1]"),
    "huge think time": named(weka(lambda one: one.update(think_time=1e300)), "think_time", "requests[1]"),
    "huge time": named(weka(lambda one: one.update(t=1e300)), "requests[1]"),
    "sent before the one in front of it": named(weka_backwards, "t=3", "think_time"),
    "an id after others than before": named(
        weka(lambda one: one.update(hash_ids=[7, 0, 9])), "request 1", "hash_ids"
    ),
    "too few ids": named(weka(lambda one: one.update(hash_ids=[0])), "request 1", "hash_ids"),
    "a known id after a new one": named(
        weka(lambda one: one.update(hash_ids=[7, 8, 0])), "request 1", "hash_ids"
    ),
    "no requests": named(weka(requests=[]), "no requests"),
    "time below zero": named(weka(having("t", -1)), "requests[1].t"),
    "time as text": named(weka(having("api_time", "5")), "requests[1].api_time"),
    "unknown kind": named(weka(having("type", "x")), "'x'", "requests[1].type"),
    "no tokens": named(weka(having("in", 0)), "requests[1].in"),
    "no block": named(weka(block_size=0), "block_size"),
    "unknown scope": named(weka(hash_id_scope="global"), "hash_id_scope"),
    "empty folder": empty,
    "one torn file of 31": one_torn_of_31,
    "no session fits": too_long,
    "a run file": run_file("trace", ",format=weka"),
}
OTHERS = {
    "a run file as a log": run_file("requests"),
    "a run file as sessions": run_file("requests", ",sessions=4"),
    "a run file as a trace": run_file("trace", ",sessions=4"),
}
BAD = {
    **{f"weka: {name}": one for name, one in WEKA.items()},
    **{f"mooncake: {name}": one for name, one in of_trace(MOONCAKE).items()},
    **{f"openai: {name}": one for name, one in of_log(OPENAI).items()},
    **{f"tap: {name}": one for name, one in of_log(TAPPED).items()},
    **OTHERS,
}


@pytest.mark.parametrize("made", BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(made: Callable[[Path], Made], tmp_path: Path) -> None:
    spec, names = made(tmp_path)
    with pytest.raises(UsageError) as refused:
        build(spec)
    assert all(name in f"{refused.value.message} {refused.value.hint}" for name in names), (refused, names)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_each_command_says_it_before_it_starts_anything(
    command: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    spec, names = BAD["weka: unknown field"](tmp_path)
    assert run([*command, spec]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in names), (said, names)
