"""Tokens computed twice after preemptions: with them, every scheduled token of a replay is accounted for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from tests.choice import each_value
from tests.simulator import on

pytestmark = pytest.mark.vllm

# (model, blocks of 32 tokens, load): running requests outgrow the pool.
CASES = [
    ("tiny-llama", 60, "decode:requests=24,prompt=48,output=300"),
    ("tiny-llama", 70, "zipf:prefixes=6,prefix=300,suffix=40,requests=40,concurrency=12,output=120"),
    ("tiny-gemma3", 140, "zipf:prefixes=6,prefix=300,suffix=40,requests=40,concurrency=12,output=120"),
]
FLAGS = ["--block-size", "32", "--max-model-len", "800", "--max-num-batched-tokens", "256"]


def replayed(simulators: Simulators, case: tuple[str, int, str], *flags: str, **more: Any) -> Run:
    model, blocks, load = case
    words = [*FLAGS, "--max-num-seqs", "16", "--num-gpu-blocks-override", str(blocks), *flags]
    core = {name: more.pop(name) for name in ("core",) if name in more}
    wanted = Setup(model=model, engine_args=words, device=Simulated(**more), **core)
    [(_, run)] = simulators.run(on(build(load, seed=1), [wanted]))
    assert isinstance(run, Run), run
    return run


def twice(run: Run) -> int:
    return sum(sum(causes.values()) for causes in run.header.extra.computed_twice.values())


@pytest.mark.parametrize(
    ("case", "more"), each_value(CASES, [{}, {"async_scheduling": True}, {"core": "kvtune"}])
)
def test_every_scheduled_token_is_counted_once_or_as_computed_twice(
    simulators: Simulators, case: tuple[str, int, str], more: dict[str, Any]
) -> None:
    run = replayed(simulators, case, **more)
    requests, steps = run.table("requests"), run.table("steps")
    once = requests["prompt_tokens"] - requests["hit_tokens"] + requests["output_tokens"] - 1
    assert requests["preemptions"].sum() > 0
    assert twice(run) > 0
    assert steps["scheduled_tokens"].sum() == once.sum() + twice(run)
    rows = [int(row) for row in run.header.extra.computed_twice]
    assert (requests["preemptions"][rows] > 0).all()
    assert all(
        set(causes) <= {"evicted", "not_retained", "partial_block"}
        for causes in run.header.extra.computed_twice.values()
    )


def test_without_prefix_caching_all_of_it_is_skipped(simulators: Simulators) -> None:
    run = replayed(simulators, CASES[0], "--no-enable-prefix-caching")
    assert twice(run) > 0
    assert {cause for causes in run.header.extra.computed_twice.values() for cause in causes} == {
        "skipped_lookup"
    }


def test_a_pool_that_holds_all_computes_nothing_twice(simulators: Simulators) -> None:
    model, _, load = CASES[0]
    run = replayed(simulators, (model, 900, load))
    assert not run.header.extra.computed_twice and not np.any(run.table("requests")["preemptions"])
