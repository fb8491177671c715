"""Admission by cached prefix in the simulator: all modes and shortcuts say the same, and an overload gains by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvtune.run.types import Run
from kvtune.sim.settings import SimSettings
from kvtune.sim.simulators import Simulators
from tests.sim.test_replay import TIMES, replays, settings

pytestmark = pytest.mark.vllm

ASKED = {"admission": "longest_prefix", "admission_age_s": 20.0}
# (model, blocks, workload): requests come faster than they are answered, pools are short of blocks.
OVERLOADS = [
    ("tiny-llama", 120, "zipf:prefixes=12,prefix=500,requests=90,concurrency=40,output=60"),
    ("tiny-llama", 160, "chat:sessions=24,turns=3,output=60,rate=20.0"),
    ("tiny-llama", 70, "decode:requests=24,prompt=48,output=300"),
    ("tiny-gemma3", 260, "zipf:prefixes=10,prefix=600,suffix=40,requests=60,concurrency=40,output=50"),
    ("tiny-qwen3next", 40, "chat:sessions=12,turns=3,first=500,output=100"),
]


def asked(model: str, blocks: int, **more: Any) -> SimSettings:
    core = more.pop("core_settings", ASKED)
    return settings(model, blocks, core="kvtune", core_settings=core, **more)


def same(one: Run, other: Run, *columns: str) -> None:
    for column in columns:
        np.testing.assert_array_equal(one.table("requests")[column], other.table("requests")[column])


@pytest.mark.parametrize(("model", "blocks", "workload"), OVERLOADS)
def test_modes_and_shortcuts_change_nothing(
    simulators: Simulators, model: str, blocks: int, workload: str
) -> None:
    exact, plain, jumped = replays(
        simulators,
        workload,
        [
            asked(model, blocks, digests=True),
            asked(model, blocks, digests=True, shortcuts=False),
            asked(model, blocks, mode="jump"),
        ],
    )
    assert exact.header.core.parts["admission"] is True
    assert exact.header.core.counters["admission_admitted"] >= len(exact.table("requests")["id"])
    assert plain.header.extra.digests == exact.header.extra.digests
    same(exact, plain, "hit_tokens", "output_tokens", "preemptions", *TIMES)
    same(exact, jumped, "hit_tokens", "output_tokens", "preemptions", *TIMES)
    counted = [
        {name: n for name, n in run.header.core.counters.items() if name.startswith("admission")}
        for run in (exact, plain, jumped)
    ]
    assert counted[0] == counted[1] == counted[2]


def test_an_overload_hits_more_and_a_calm_load_nothing_else(simulators: Simulators) -> None:
    model, blocks, busy = OVERLOADS[1]
    for workload in (busy, busy.replace("rate=20.0", "rate=0.05")):
        off, on = replays(
            simulators, workload, [asked(model, blocks, core_settings={}), asked(model, blocks)]
        )
        if workload == busy:
            assert on.table("requests")["hit_tokens"].sum() > off.table("requests")["hit_tokens"].sum()
            assert on.header.core.counters["admission_overtaken"] > 0
        else:
            same(off, on, "hit_tokens", "output_tokens", *TIMES)
            assert on.header.core.counters["admission_ahead"] == 0
            assert "admission" not in off.header.core.parts


def test_async_scheduling_takes_it_too(simulators: Simulators) -> None:
    model, blocks, workload = OVERLOADS[0]
    plain, short = replays(
        simulators,
        workload,
        [asked(model, blocks, digests=True, async_scheduling=True, shortcuts=on) for on in (False, True)],
    )
    assert plain.header.extra.digests == short.header.extra.digests
    assert short.header.core.counters["admission_ahead"] > 0


def test_priority_scheduling_stands_aside_by_name(simulators: Simulators) -> None:
    model, blocks, workload = OVERLOADS[0]
    wanted = asked(model, blocks)
    flags = [*wanted.engine_args, "--scheduling-policy", "priority"]
    run = replays(
        simulators,
        workload,
        [SimSettings(model=model, engine_args=flags, core="kvtune", core_settings=dict(ASKED))],
    )[0]
    assert run.header.core.parts["admission"] is False
    assert any("admission: priority scheduling" in note for note in run.header.notes)
