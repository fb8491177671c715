"""Every number of a run file or a study has a range in its type; what is outside is refused with the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.study import read_study
from kvtune.base.errors import UsageError
from kvtune.data.run.extras import Extras, SloName, faults_of, read_extras
from kvtune.data.run.file import read_label, read_run, write_run
from kvtune.data.run.known import KNOWN
from kvtune.data.run.ranges import LARGEST, check_numbers
from kvtune.data.run.slo import LIMITS
from kvtune.data.run.types import AT_MOST, BELOW_ZERO, TABLES, Header, Run, RunLabel
from kvtune.reading.analysis.memory import memory
from tests.choice import first_of
from tests.data.run.test_hostile_files import GOLDEN, column, header_says, parts_of
from tests.simulator import run as kvtune

STUDY = GOLDEN.parent / "study1-tune.jsonl"
HUGE = int("9" * 4000)


def inner(kind: Any) -> Iterator[tuple[str, Any]]:
    """Each type within a type, with the name of the field that leads to it."""
    seen: set[Any] = set()
    waiting = [("", msgspec.inspect.type_info(kind))]
    while waiting:
        name, one = waiting.pop()
        yield name, one
        if isinstance(one, msgspec.inspect.StructType):
            if one.cls not in seen:
                seen.add(one.cls)
                waiting.extend((f"{one.cls.__name__}.{field.name}", field.type) for field in one.fields)
            continue
        single = ("item_type", "key_type", "value_type")
        waiting.extend((name, getattr(one, part)) for part in single if hasattr(one, part))
        for part in ("types", "item_types"):
            waiting.extend((name, each) for each in getattr(one, part, ()))


@pytest.mark.parametrize("kind", [Header, Extras, RunLabel, KNOWN])
def test_every_number_of_a_header_has_a_range(kind: type) -> None:
    numbers = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
    found = [(name, one) for name, one in inner(kind) if isinstance(one, numbers)]
    assert len(found) > 5
    open_ = {
        name
        for name, one in found
        if (one.ge is None and one.gt is None) or (one.le is None and one.lt is None)
    }
    assert open_ == set()


def test_ranges_of_columns_name_columns() -> None:
    known = {(table, name) for table, columns in TABLES.items() for name in columns}
    assert {*BELOW_ZERO, *AT_MOST} <= known


HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "model length of 4,000 digits": ({"engine": {"max_model_len": HUGE}}, "engine.max_model_len"),
    "blocks below 0": ({"engine": {"num_blocks": -1}}, "engine.num_blocks"),
    "frozen null": ({"processes": [{"pid": 1, "role": "engine_core", "gc": {"frozen": None}}]}, "gc.frozen"),
    "frozen huge": ({"processes": [{"pid": 1, "role": "engine_core", "gc": {"frozen": HUGE}}]}, "gc.frozen"),
    "counter": ({"core": {"counters": {"a": HUGE}}}, "core.counters"),
    "cores": ({"host": {"cores": -(1 << 63)}}, "host.cores"),
    "wall": ({"wall_s": -1e308}, "wall_s"),
    "vLLM's counters": ({"engine_counters": {"queries": 1e308}}, "engine_counters"),
    "seed": ({"workload": {"seed": 1 << 63}}, "workload.seed"),
    "parameter": ({"workload": {"params": {"prefix": HUGE}}}, "workload.params"),
}
COLUMNS = {
    "evicted below 0": ("pool/evicted", -1, "i4"),
    "generation below 0": ("gc/generation", -128, "i1"),
    "generation above 2": ("gc/generation", 3, "i1"),
    "hit below -1": ("requests/hit_tokens", -2, "i8"),
    "bytes huge": ("memory/rss_bytes", 1 << 62, "i8"),
}


def changed(tmp_path: Path, changes: dict[str, Any]) -> Path:
    path, parts = tmp_path / "a.kvrun", parts_of(GOLDEN)
    decoded = json.loads(parts["header.json"])
    merged = {
        name: {**decoded[name], **value} if isinstance(value, dict) and name in decoded else value
        for name, value in changes.items()
    }
    path.write_bytes(header_says(**merged)(parts))
    return path


@pytest.mark.parametrize("what", HEADERS)
def test_a_number_outside_its_range_is_refused_with_its_name(tmp_path: Path, what: str) -> None:
    changes, says = HEADERS[what]
    path = changed(tmp_path, changes)
    with pytest.raises(UsageError, match=r"a\.kvrun is not a readable run file: ") as caught:
        read_run(path)
    assert (
        says in caught.value.message.replace("[...]", "").replace("[0]", "")
        and len(caught.value.message) < 400
    )


@pytest.mark.parametrize("what", COLUMNS)
def test_a_column_outside_its_range_is_refused_with_its_name(tmp_path: Path, what: str) -> None:
    name, value, kind = COLUMNS[what]
    parts = parts_of(GOLDEN)
    table = name.partition("/")[0]
    rows = len(read_run(GOLDEN).table(table)["process" if table != "requests" else "id"])
    path = tmp_path / "a.kvrun"
    path.write_bytes(column(name, np.full(max(rows, 1), value, kind))(parts))
    with pytest.raises(UsageError, match=name.replace("/", r"\.")):
        read_run(path)


@pytest.mark.parametrize(
    "slo", first_of([{"ttft": -1.0}, {"x": 1}, {"ttft": 0}, {"e2e": 1e308}, {"tpot": HUGE}, None])
)
def test_limits_that_are_none_are_left_out_and_a_note_says_so(
    tmp_path: Path, slo: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(tmp_path, {"extra": {"slo": slo}})
    run = read_run(path)
    assert run.header.extra.slo == {} and [
        n for n in run.header.notes if n.startswith("extra.slo is left out: ")
    ]
    for command in (["report", str(path), "--console"], ["compare", str(path), str(path), "--json"]):
        assert kvtune(command) == 0
    assert "unexpected" not in capsys.readouterr().err


def test_the_names_of_limits_are_those_of_slo() -> None:
    assert set(SloName.__args__) == set(LIMITS)  # type: ignore[attr-defined]


def test_fields_of_a_later_version_are_no_fault() -> None:
    assert faults_of({"later": 3, "slo": {"ttft": 5.0}}) == [] and faults_of(None) == []
    assert read_extras({"slo": {"ttft": 5.0}}).slo == {"ttft": 5.0}


def test_a_label_has_the_same_ranges(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"workload\.seed"):
        read_label(changed(tmp_path, {"workload": {"seed": HUGE}}))


def test_memory_samples_of_one_moment_have_no_slope(tmp_path: Path) -> None:
    run = read_run(GOLDEN)
    rows = 100
    kinds = TABLES["memory"]
    table = {name: np.zeros(rows, kind) for name, kind in kinds.items()}
    table["t_s"] += 3.0
    table["rss_bytes"] += np.arange(rows)
    made = Run(run.header, {**run.tables, "memory": table})
    assert all(each.trend.slope_bytes_s is None for each in memory(made).values())
    write_run(made, tmp_path / "a.kvrun")
    assert kvtune(["report", str(tmp_path / "a.kvrun"), "--console"]) == 0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("9" * 4000, r"\.prefix_cache\.hit_rate is a whole number of 13,288 bits"),
        ("-1e308", r"\.prefix_cache\.hit_rate is -1e\+308, and 1e\+15 is the largest number"),
        ("1e16", r"\.prefix_cache\.hit_rate is 1e"),
    ],
)
def test_a_study_with_such_a_figure_is_refused_with_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, says: str
) -> None:
    head, *trials = STUDY.read_text().splitlines()
    at = next(n for n, line in enumerate(trials) if json.loads(line)["summary"])
    trial = json.loads(trials[at])
    trial["summary"]["prefix_cache"]["hit_rate"] = "HERE"
    trials[at] = json.dumps(trial).replace('"HERE"', value)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join((head, *trials, "")))
    with pytest.raises(UsageError, match=rf"a\.jsonl, line {at + 2}: not a trial: \$\.summary{says}"):
        read_study(path)
    assert kvtune(["report", str(path)]) == 2
    assert "unexpected" not in capsys.readouterr().err


def test_numbers_within_the_ranges_pass() -> None:
    check_numbers([0, -1, LARGEST, (1 << 63) - 1, {"a": [True, None, "9" * 5000, 1e-300]}])
    with pytest.raises(ValueError, match=r"\$\.a\[1\] is inf"):
        check_numbers({"a": [1, float("inf")]})
    assert Trial(number=1, settings={}, on="sim").summary == {}
