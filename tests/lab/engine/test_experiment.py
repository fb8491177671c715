"""Experiments: their order, what ends them, and what a failed run means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.lab.engine.experiment import BASELINE, INTERRUPTED, Side, experiment, order


def sides(*names: str) -> list[Side[Any]]:
    return [Side(name, {}) for name in (BASELINE, *names)]


class Measured:
    """Stands in for an engine: the next of `outcomes` is raised if it is an error, else the run's number returned."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes: Iterator[BaseException | None] = iter(outcomes)
        self.made: list[str] = []

    def __call__(self, side: Side[int]) -> int:
        self.made.append(side.name)
        if error := next(self.outcomes, None):
            raise error
        return len(self.made)


@pytest.mark.parametrize(("count", "repeats"), [(1, 1), (3, 4), (10, 3)])
def test_the_order_is_interleaved(count: int, repeats: int) -> None:
    pairs = list(order(count, repeats))
    assert Counter(side for _, side in pairs) == dict.fromkeys(range(count), repeats)
    assert [repeat for repeat, _ in pairs] == sorted(repeat for repeat, _ in pairs)
    if repeats >= 2 and count > 1:
        first = [v for r, v in pairs if r == 0]
        assert [v for r, v in pairs if r == 1] == first[::-1]
    if repeats >= 3 and count > 2:
        assert len({tuple(v for r, v in pairs if r == n) for n in range(repeats)}) > 1


def test_a_side_that_failed_is_not_run_again_and_the_others_go_on() -> None:
    one, two, three = sides("a", "b")
    measured = Measured(None, KvtuneError("no memory"))
    assert experiment([one, two, three], 2, measured).why == ""
    assert measured.made == [BASELINE, "a", "b", "b", BASELINE]
    assert two.failed == "no memory" and two.runs == []
    assert one.runs == [1, 5] and three.runs == [3, 4]


def test_without_its_baseline_an_experiment_ends() -> None:
    both = sides("a")
    died = KvtuneError("died")
    ended = experiment(both, 3, Measured(None, None, None, died))
    assert ended.why == "the baseline failed: died" and ended.error is died
    assert [side.runs for side in both] == [[1], [2, 3]]


@pytest.mark.parametrize("stop", [KvtuneError("stopped", "", 130), KeyboardInterrupt()])
def test_ctrl_c_ends_it_and_what_was_measured_stays(stop: BaseException) -> None:
    both = sides("a")
    ended = experiment(both, 3, Measured(None, stop))
    assert ended.why == INTERRUPTED and ended.error is stop
    assert both[0].runs == [1] and both[1].failed == ""


def test_no_run_begins_that_would_exceed_the_budget() -> None:
    now: list[float] = [0.0]

    def measure(side: Side[int]) -> int:
        now[0] += 30.0
        return 0

    both = sides("a")
    ended = experiment(both, 3, measure, budget_s=100.0, clock=lambda: now[0])
    assert sum(len(side.runs) for side in both) == 3 and "the budget of 1.66" in ended.why
    both, now[0] = sides("a"), 0.0
    experiment(both, 3, measure, budget_s=0.0, least=2, clock=lambda: now[0])
    assert [len(side.runs) for side in both] == [2, 2]


def test_earlier_runs_count_and_enough_ends_it() -> None:
    both = sides("a")
    both[0].runs.append(0)
    kept = {BASELINE: [7], "a": [8, 9]}
    measured = Measured()
    ended = experiment(
        both,
        4,
        measured,
        kept=lambda side: kept[side.name].pop(0) if kept[side.name] else None,
        least=2,
        enough=lambda: len(both[1].runs) == 3,
    )
    assert ended.why == "" and both[0].runs == [0, 7, 2] and both[1].runs == [8, 9, 1]
