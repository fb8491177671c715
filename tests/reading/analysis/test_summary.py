from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvtune.cli.schema import schema_of
from kvtune.data.run.types import EngineInfo, Run, Validity
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.requests.loads.spec import build
from tests.reading.analysis.made import header_of, served, table, workload_of

VALIDATOR = Draft202012Validator(schema_of("profile"))
"""The schema of `profile --json`."""


def full() -> tuple[Run, Any]:
    workload = build("rounds:prefixes=2,prefix=100,suffix=10,rounds=2,output=3")
    tables = {
        "tokens": table("tokens", request=[0, 0, 1], t_s=[0.5, 0.7, 1.5], count=[1, 1, 1]),
        "steps": table(
            "steps", process=[1], step_us=[1000.0], schedule_us=[10.0], update_us=[5.0], requests=[1]
        ),
        "gc": table("gc", process=[1], generation=[0], pause_us=[10.0]),
        "memory": table("memory", process=[1], rss_bytes=[4096]),
    }
    return served(workload, [0, 0, 96, 0], tables=tables), workload


def test_every_field_of_the_contract_is_there() -> None:
    run, workload = full()
    fields = summary(RunAnalysis(run, workload))
    VALIDATOR.validate(fields | {"run_file": "", "page": ""})
    assert fields["rounds"] == [
        {"round": 0, "requests": 2, "hit_tokens": 0, "query_tokens": 220, "ttft_ms_mean": 500.0},
        {"round": 1, "requests": 2, "hit_tokens": 96, "query_tokens": 220, "ttft_ms_mean": 500.0},
    ]
    assert fields["memory"] == {"engine_core": 4096}
    core = fields["gc"]["engine_core"]
    assert core["collections"] == [1, 0, 0]
    assert core["pause_ms"] == {"total": 0.01, "max": 0.01, "p99": 0.01}
    assert core["share_of_step"] == 0.01
    assert core["frozen"] == 500
    assert fields["host_us"] == {"schedule": 10.0, "update": 5.0, "per_request_step": 15.0}


def strict(fields: dict[str, Any]) -> str:
    return json.dumps(fields, allow_nan=False)


@pytest.mark.parametrize("state", ["complete", "partial", "failed"])
def test_runs_with_nothing_in_them_have_every_field_too(state: str) -> None:
    for workload in (None, workload_of([])):
        run = Run(header_of(state=state, processes=[], wall_s=0.0, engine=EngineInfo()))
        fields = summary(RunAnalysis(run, workload))
        VALIDATOR.validate(fields | {"run_file": "", "page": ""})
        strict(fields)
        assert fields["state"] == state


@settings(deadline=None)
@given(st.data())
def test_partial_runs_never_crash_and_never_print_nan(data: st.DataObject) -> None:
    workload = build("chat:sessions=2,turns=2")
    n = len(workload.requests)
    several = st.lists(st.sampled_from([0.0, 1.0, 2.0, np.nan]), min_size=n, max_size=n)
    run = served(
        workload,
        data.draw(st.lists(st.integers(-1, 900), min_size=n, max_size=n)),
        sent=data.draw(several),
        first=data.draw(several),
        finished=data.draw(several),
        finish=data.draw(st.lists(st.sampled_from(["length", "", "abort", "error"]), min_size=n, max_size=n)),
        output=data.draw(st.lists(st.integers(0, 70), min_size=n, max_size=n)),
        tables={
            "steps": table("steps", step_us=[np.nan], schedule_us=[np.nan], update_us=[1.0], requests=[3])
        },
        state="partial",
        wall_s=data.draw(st.sampled_from([0.0, 1.5])),
    )
    for known in (workload, None):
        fields = summary(RunAnalysis(run, known))
        VALIDATOR.validate(fields | {"run_file": "", "page": ""})
        assert strict(fields)
        cache = fields["prefix_cache"]
        assert cache["hit_tokens"] + sum(cache["misses"].values()) == cache["query_tokens"]


def test_odd_values_become_plain_json() -> None:
    settings = {
        "path": math.nan,
        3: {1, 2},
        "dtype": np.float32(1.5),
        "object": object,
        "deep": [(1, math.inf)],
    }
    run = Run(header_of(engine=EngineInfo(settings=settings), valid=Validity(timings=False, why="census")))
    fields = summary(RunAnalysis(run))
    strict(fields)
    assert fields["engine"]["settings"]["path"] is None
    assert fields["engine"]["settings"]["3"] == [1, 2]
    assert fields["engine"]["settings"]["dtype"] == 1.5
    assert fields["engine"]["settings"]["deep"] == [[1, None]]
    assert fields["valid"] == {"timings": False, "why": "census"}
