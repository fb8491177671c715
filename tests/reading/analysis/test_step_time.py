"""Step time and pauses in steps: parts add up, and every pause is in the step that contains it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.data.run.types import Run, empty_table
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.step_time import StepTime, pauses_in_steps_ms, step_time
from tests.golden.synthetic import empty_run, header, rounds_run


def test_the_parts_of_steps_add_up() -> None:
    times = step_time(rounds_run())
    assert times.schedule_s + times.execute_s + times.update_s + times.other_s == pytest.approx(times.total_s)
    assert 0 < times.prefill_s < times.total_s
    assert times.busy_share == pytest.approx(1.0)


def test_without_steps_all_times_are_zero() -> None:
    assert step_time(empty_run()) == StepTime()
    assert RunAnalysis(empty_run()).paused_steps is None


def run_of(steps: list[tuple[float, float]], collections: list[tuple[int, float, float]]) -> Run:
    """Steps as (start s, length us) of process 1, collections as (process, start s, pause us)."""
    n, m = len(steps), len(collections)
    table = {name: np.zeros(n, dtype=column.dtype) for name, column in empty_table("steps").items()}
    table["process"] = np.ones(n, "i2")
    table["t_s"] = np.array([s for s, _ in steps], "f8")
    table["step_us"] = np.array([us for _, us in steps], "f8")
    gc = {name: np.zeros(m, dtype=column.dtype) for name, column in empty_table("gc").items()}
    gc["process"] = np.array([p for p, _, _ in collections], "i2")
    gc["t_s"] = np.array([s for _, s, _ in collections], "f8")
    gc["pause_us"] = np.array([us for _, _, us in collections], "f8")
    return Run(header(), {"steps": table, "gc": gc})


def test_a_pause_lands_in_the_step_that_held_it() -> None:
    run = run_of(
        [(0.0, 1000), (0.01, 1000)], [(1, 0.0005, 200), (1, 0.005, 900), (1, 0.0101, 50), (0, 0.0102, 700)]
    )
    np.testing.assert_allclose(pauses_in_steps_ms(run), [0.2, 0.05])
    paused_steps = RunAnalysis(run).paused_steps
    assert paused_steps is not None
    assert (paused_steps.paused, paused_steps.steps) == (2, 2)
    assert paused_steps.pause_ms_mean == pytest.approx(0.125)
    assert paused_steps.share == pytest.approx(0.125)


@settings(deadline=None)
@given(
    gaps=st.lists(st.tuples(st.floats(0, 1), st.floats(1, 1e5)), min_size=1, max_size=20),
    times=st.lists(st.floats(0, 3), max_size=20),
)
def test_pauses_agree_with_looking_at_every_step(gaps: list[tuple[float, float]], times: list[float]) -> None:
    steps, now = [], 0.0
    for gap, length in gaps:
        now += gap
        steps.append((now, length))
        now += length / 1e6
    pauses_ms = pauses_in_steps_ms(run_of(steps, [(1, t, 100) for t in times]))
    # A time on the edge between two steps may count to either.
    for (start, length), pause in zip(steps, pauses_ms, strict=True):
        end = start + length / 1e6
        surely = sum(start + 1e-9 < t < end - 1e-9 for t in times)
        perhaps = sum(start - 1e-9 <= t <= end + 1e-9 for t in times)
        assert 0.1 * surely - 1e-9 <= pause <= 0.1 * perhaps + 1e-9
