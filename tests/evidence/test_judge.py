"""Ratios of runs and what they say of a claim."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.evidence.judge import Ratio, judge, ratio, reason

FIGURES = st.lists(st.floats(0.1, 1e6), min_size=2, max_size=6)


def test_a_ratio_is_of_the_second_over_the_first() -> None:
    measured = ratio([100.0, 102.0, 98.0], [201.0, 199.0, 200.0])
    assert measured.ratio == pytest.approx(2.0, rel=0.01)
    assert measured.low is not None and measured.high is not None
    assert measured.low < 2.0 < measured.high and measured.low > 1.8
    assert measured.runs == 3


@given(FIGURES, FIGURES)
def test_turning_the_sides_round_turns_the_ratio_round(a: list[float], b: list[float]) -> None:
    one, two = ratio(a, b), ratio(b, a)
    assert one.ratio is not None and two.ratio is not None
    assert one.ratio * two.ratio == pytest.approx(1.0)
    if one.low is not None and one.high is not None and math.isfinite(one.high) and one.low > 1e-200:
        assert two.high is not None and one.low * two.high == pytest.approx(1.0, rel=1e-6)
        assert one.low <= one.ratio * (1 + 1e-9) and one.ratio <= one.high * (1 + 1e-9)


def test_pairs_of_a_machine_that_drifts() -> None:
    drift = [100.0, 40.0, 250.0, 90.0]
    apart = ratio(drift, [1.1 * x for x in drift])
    paired = ratio(drift, [1.1 * x for x in drift], paired=True)
    assert apart.low is not None and apart.low < 1
    assert paired.low == pytest.approx(1.1) and paired.high == pytest.approx(1.1)


def test_pairs_with_nothing_on_one_side() -> None:
    measured = ratio([4.0, 5.0, 6.0, 5.0], [0.0, 1.0, 0.0, 0.0], paired=True)
    assert measured.ratio == pytest.approx(0.05) and measured.low == 0.0
    assert measured.high is not None and 0.05 < measured.high < 0.3
    assert judge(measured, "lower", None) == "holds"
    assert judge(ratio([3.0] * 3, [0.0] * 3, paired=True), "lower", None) == "holds"
    assert judge(ratio([0.0] * 3, [1.0] * 3, paired=True), "lower", None) == "not measured"


def test_counts_without_spread_are_exact() -> None:
    assert ratio([4.0, 4.0], [1.0, 1.0]) == Ratio(0.25, 0.25, 0.25, 2)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([1.0], []), ([], [])])
def test_nothing_measured(a: list[float], b: list[float]) -> None:
    assert judge(ratio(a, b), "higher", 1.3) == "not measured"


def test_a_zero_gives_no_interval() -> None:
    measured = ratio([2.0, 2.0], [0.0, 0.0])
    assert (measured.ratio, measured.low) == (0.0, None)
    assert judge(measured, "lower", None) == "no difference shown"


@pytest.mark.parametrize(
    ("low", "middle", "high", "direction", "published", "verdict"),
    [
        (1.2, 1.3, 1.4, "higher", 1.3, "holds"),
        (1.02, 1.05, 1.08, "higher", 1.3, "smaller here"),
        (0.9, 1.05, 1.2, "higher", 1.3, "no difference shown"),
        (0.8, 0.85, 0.9, "higher", 1.3, "does not hold here"),
        (0.2, 0.25, 0.3, "lower", 0.22, "holds"),
        (0.8, 0.85, 0.9, "lower", 0.22, "smaller here"),
        (0.8, 0.85, 0.9, "lower", None, "holds"),
        (0.95, 1.0, 1.05, "equal", 1.0, "holds"),
        (0.8, 1.0, 1.25, "equal", 1.0, "no difference shown"),
        (1.12, 1.2, 1.3, "equal", 1.0, "does not hold here"),
    ],
)
def test_verdicts(
    low: float, middle: float, high: float, direction: str, published: float | None, verdict: str
) -> None:
    assert judge(Ratio(middle, low, high, 3), direction, published) == verdict


def test_the_reason_says_what_the_host_takes() -> None:
    baseline = {
        "gc": {"engine_core": {"share_of_step": 0.008}},
        "host_us": {"schedule": 100.0, "update": 50.0},
        "step_ms": {"mean": 1.5},
    }
    assert reason(baseline) == (
        "in the baseline collections are 0.8 % of EngineCore's step time and schedule and update are 10 %: "
        "no more can be won there"
    )
    assert reason({**baseline, "gc": {}, "host_us": {"schedule": None, "update": None}}) == ""


def test_a_count_is_exact_after_one_run() -> None:
    assert ratio([1280.0], [160.0], count=True) == Ratio(0.125, 0.125, 0.125, 1)
    assert ratio([1280.0], [160.0]).low is None
    assert ratio([0.0], [640.0], count=True).ratio is None
