"""Collections joined to steps, each process's account of them, and leaks, against figures computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvtune.data.run.extras import CollectorCounts, Extras, HeapSize
from kvtune.data.run.types import EngineInfo, Run
from kvtune.reading.analysis.gc import collectors
from kvtune.reading.analysis.memory import memory
from kvtune.reading.analysis.run import RunAnalysis
from tests.reading.analysis.made import header_of, table


def run_of(**tables: object) -> Run:
    return Run(header_of(), dict(tables))  # type: ignore[arg-type]


STEPS = table("steps", process=[1] * 4, t_s=[0.0, 1.0, 2.0, 3.0], step_us=[100e3, 200e3, 100e3, 100e3])


def test_steps_with_and_without_a_collection() -> None:
    gc = table("gc", process=[1, 0], t_s=[1.05, 2.05], generation=[2, 0], pause_us=[90e3, 1e3])
    collections_in_steps = RunAnalysis(run_of(steps=STEPS, gc=gc)).collections_in_steps
    assert (collections_in_steps.with_collection.count, collections_in_steps.without.count) == (
        1,
        3,
    )  # the front end's holds up no step
    assert collections_in_steps.with_collection.max == pytest.approx(
        200.0
    ) and collections_in_steps.without.max == pytest.approx(100.0)


def test_several_collections_in_a_step_and_those_between_steps_are_all_counted() -> None:
    """Four in two steps, as admissions cause them, and one between steps."""
    gc = table(
        "gc", process=[1, 1, 1, 1, 1, 0], t_s=[1.01, 1.05, 1.19, 3.0, 2.5, 1.1],
        generation=[0] * 6, pause_us=[1e3, 1e3, 1e3, 2e3, 7e3, 50e3],
    )  # fmt: skip
    placed = RunAnalysis(run_of(steps=STEPS, gc=gc)).collections_in_steps.placed
    assert (placed.in_steps, placed.steps, placed.between_steps) == (4, 2, 1)
    assert placed.between_ms == pytest.approx(7.0)


def test_shares_by_generation_and_preempted_pauses() -> None:
    gc = table(
        "gc", process=[1] * 4, generation=[0, 0, 1, 2], pause_us=[1e3, 2e3, 5e3, 50e3],
        cpu_us=[1e3, 2e3, 5e3, 10e3],
    )  # fmt: skip
    core = collectors(run_of(steps=STEPS, gc=gc))["engine_core"]
    assert core.share_by_generation == pytest.approx((3e3 / 500e3, 5e3 / 500e3, 50e3 / 500e3))
    assert core.cpu_ms == pytest.approx(18.0)
    assert core.preempted == 1 and core.preempted_ms == pytest.approx(40.0)


def test_a_front_end_is_compared_with_the_mean_of_several_engines() -> None:
    steps = table("steps", process=[1, 1, 2], t_s=[0.0, 1.0, 0.0], step_us=[100e3, 100e3, 300e3])
    gc = table("gc", process=[0, 2], generation=[0, 0], pause_us=[25e3, 30e3])
    by_process = [c.share_of_step for c in collectors(run_of(steps=steps, gc=gc)).values()]
    assert by_process[0] == pytest.approx(0.1) and by_process[2] == pytest.approx(0.1)


def test_survivors_per_step_come_from_the_ring() -> None:
    counts = CollectorCounts(survivors=400, heap=HeapSize(start=9, last=12))
    extra = Extras(ledger={"1": counts})
    by_process = collectors(Run(header_of(extra=extra), {"steps": STEPS}))["engine_core"]
    assert by_process.survivors_per_step == 100.0 and (by_process.heap_start, by_process.heap_last) == (9, 12)


def memory_of(seconds: float, bytes_s: float, noise: float) -> Run:
    t_s = np.arange(0, seconds, 0.2)
    rss = 1e9 + bytes_s * t_s + np.random.default_rng(0).normal(0, noise, len(t_s))
    return run_of(memory=table("memory", process=[1] * len(t_s), t_s=t_s, rss_bytes=rss.astype(int)))


def test_a_leak_is_found_with_an_interval_around_its_rate() -> None:
    by_process = memory(memory_of(300, 100_000, 1e6))["engine_core"].trend
    assert by_process.verdict == "grows"
    assert by_process.low_bytes_s is not None and by_process.high_bytes_s is not None
    assert by_process.low_bytes_s < 100_000 < by_process.high_bytes_s


def test_noise_and_short_runs_are_no_leaks() -> None:
    assert memory(memory_of(300, 0, 1e6))["engine_core"].trend.verdict == "no growth shown"
    assert memory(memory_of(30, 1_000_000, 0))["engine_core"].trend.verdict == "too short to tell"


def test_the_pool_is_as_large_as_its_largest_group() -> None:
    groups = [{"page_bytes": 1024, "layers": 3}, {"page_bytes": 1024, "layers": 2}]
    engine = EngineInfo(num_blocks=100, groups=groups)
    assert RunAnalysis(Run(header_of(engine=engine))).pool_bytes == 100 * 3 * 1024
    assert RunAnalysis(Run(header_of(engine=EngineInfo()))).pool_bytes is None
