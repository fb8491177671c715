"""Collections joined to steps and token gaps, and each process's ledger, against figures computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvtune.analysis.leaks import pool_bytes, trends
from kvtune.analysis.ledger import gap_outliers, ledgers
from kvtune.analysis.run import RunAnalysis
from kvtune.run.extras import CollectorCounts, Extras, HeapSize
from kvtune.run.types import EngineInfo, Run
from tests.analysis.made import header_of, table


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


def test_a_pause_counts_for_the_gap_that_it_lies_in_not_the_one_it_began_in() -> None:
    """EngineCore collects for 80 ms from 1 ms before the front end has the tokens of the step before."""
    tokens = table("tokens", request=[0] * 5, t_s=[0.0, 0.01, 0.02, 0.11, 0.12], count=[1] * 5)
    gc = table("gc", process=[1], t_s=[0.019], generation=[2], pause_us=[80e3])
    gaps = gap_outliers(run_of(tokens=tokens, gc=gc))
    assert (gaps.outliers, gaps.with_collection, gaps.explained) == (1, 1, 1)
    assert gaps.other_gaps_with_collection == 1


def test_pauses_of_two_processes_at_once_count_once() -> None:
    """A gap of 100 ms over a median of 10; two pauses of 30 ms side by side explain a third of it, not two."""
    tokens = table("tokens", request=[0] * 5, t_s=[0.0, 0.01, 0.02, 0.12, 0.13], count=[1] * 5)
    gc = table("gc", process=[1, 2], t_s=[0.03, 0.031], generation=[2, 2], pause_us=[30e3, 29e3])
    gaps = gap_outliers(run_of(tokens=tokens, gc=gc))
    assert (gaps.outliers, gaps.with_collection, gaps.explained) == (1, 1, 0)
    apart = table("gc", process=[1, 2], t_s=[0.03, 0.07], generation=[2, 2], pause_us=[30e3, 29e3])
    assert gap_outliers(run_of(tokens=tokens, gc=apart)).explained == 1


def test_outliers_that_collections_explain_and_those_they_do_not() -> None:
    """Gaps 10 ms, but one of 100 ms with a 90 ms pause, one of 100 ms with a 1 ms pause, one of 50 ms with none."""
    gaps = np.array([0.01] * 20 + [0.1] + [0.01] * 5 + [0.1] + [0.01] * 5 + [0.05] + [0.01] * 5)
    t_s = np.concatenate(([0.0], np.cumsum(gaps)))
    first, second = t_s[20] + 0.001, t_s[26] + 0.001
    tokens = table("tokens", request=[0] * len(t_s), t_s=t_s, count=[1] * len(t_s))
    gc = table("gc", process=[2, 1], t_s=[second, first], pause_us=[1e3, 90e3])
    outliers = gap_outliers(run_of(tokens=tokens, gc=gc))
    assert outliers.gaps == len(gaps) and outliers.median_ms == pytest.approx(10.0)
    assert (outliers.outliers, outliers.with_collection, outliers.explained) == (3, 2, 1)
    assert outliers.other_gaps_with_collection == 0


def test_gaps_are_within_requests_only() -> None:
    tokens = table("tokens", request=[0, 0, 1, 1], t_s=[0.0, 0.1, 9.0, 9.1], count=[1] * 4)
    assert gap_outliers(run_of(tokens=tokens)).gaps == 2
    assert gap_outliers(run_of()).gaps == 0


def test_shares_by_generation_and_preempted_pauses() -> None:
    gc = table(
        "gc", process=[1] * 4, generation=[0, 0, 1, 2], pause_us=[1e3, 2e3, 5e3, 50e3],
        cpu_us=[1e3, 2e3, 5e3, 10e3],
    )  # fmt: skip
    ledger = ledgers(run_of(steps=STEPS, gc=gc))["engine_core"]
    assert ledger.share_of_step == pytest.approx((3e3 / 500e3, 5e3 / 500e3, 50e3 / 500e3))
    assert ledger.cpu_ms == pytest.approx(18.0)
    assert ledger.preempted == 1 and ledger.preempted_ms == pytest.approx(40.0)


def test_survivors_per_step_come_from_the_ring() -> None:
    counts = CollectorCounts(survivors=400, heap=HeapSize(start=9, last=12))
    extra = Extras(ledger={"1": counts})
    by_process = ledgers(Run(header_of(extra=extra), {"steps": STEPS}))["engine_core"]
    assert by_process.survivors_per_step == 100.0 and (by_process.heap_start, by_process.heap_last) == (9, 12)


def memory_of(seconds: float, bytes_s: float, noise: float) -> Run:
    t_s = np.arange(0, seconds, 0.2)
    rss = 1e9 + bytes_s * t_s + np.random.default_rng(0).normal(0, noise, len(t_s))
    return run_of(memory=table("memory", process=[1] * len(t_s), t_s=t_s, rss_bytes=rss.astype(int)))


def test_a_leak_is_found_with_an_interval_around_its_rate() -> None:
    by_process = trends(memory_of(300, 100_000, 1e6))["engine_core"]
    assert by_process.verdict == "grows"
    assert by_process.low_bytes_s is not None and by_process.high_bytes_s is not None
    assert by_process.low_bytes_s < 100_000 < by_process.high_bytes_s


def test_noise_and_short_runs_are_no_leaks() -> None:
    assert trends(memory_of(300, 0, 1e6))["engine_core"].verdict == "no growth shown"
    assert trends(memory_of(30, 1_000_000, 0))["engine_core"].verdict == "too short to tell"


def test_the_pool_is_as_large_as_its_largest_group() -> None:
    groups = [{"page_bytes": 1024, "layers": 3}, {"page_bytes": 1024, "layers": 2}]
    engine = EngineInfo(num_blocks=100, groups=groups)
    assert pool_bytes(Run(header_of(engine=engine))) == 100 * 3 * 1024
    assert pool_bytes(Run(header_of(engine=EngineInfo()))) is None
