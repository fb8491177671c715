"""The judge alone: what a distance is, what is said of so many hits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvtune.answers.check.judge import Answer, common, distance, judged, limit

COLD = Answer([1, 2], [{1: -0.5, 3: -1.5}, {2: -0.1, 5: -3.0}])


def test_a_distance_is_of_the_same_tokens_and_ends_where_answers_part() -> None:
    near = Answer([1, 2], [{1: -0.6, 3: -1.4}, {2: -0.1, 5: -3.0}])
    assert distance(COLD, COLD) == 0.0 and distance(COLD, near) == pytest.approx(math.sqrt(0.1**2 / 2))
    # Both took another choice by 0.2 nats: what lies between is that, and what follows is of another text.
    parted = Answer([3, 9], [{3: -0.8, 1: -1.0}, {9: -0.1, 5: -9.0}])
    assert distance(COLD, parted) == pytest.approx(math.sqrt(0.6**2 / 2))
    assert distance(COLD, parted) == distance(parted, COLD)


def test_garbage_is_far_although_no_token_is_known_to_both() -> None:
    garbage = Answer([70, 71], [{70: -0.001, 72: -9.0}, {71: -0.001, 73: -9.0}])
    assert distance(Answer([1, 2], [{1: -0.001}, {2: -0.001}]), garbage) > 3.0


def test_the_choice_alone_bounds_how_far_another_token_was() -> None:
    """Public recordings have the chosen token's logprob only."""
    sure, other = Answer([1], [{1: -1e-6}]), Answer([2], [{2: -1e-6}])
    assert distance(sure, other) > 10.0
    even, turned = Answer([1], [{1: -0.7}]), Answer([2], [{2: -0.69}])
    assert distance(even, turned) < 0.01


@pytest.mark.parametrize("seen", [0.3, 0.8, 1.0])
def test_power_is_that_of_independent_faults(seen: float) -> None:
    draw = np.random.default_rng(1)
    for hits in (5, 20, 32):
        faults = draw.random((20_000, hits)) < 0.1 * seen
        verdict, seen_with, more = judged(0, hits, seen)
        assert faults.any(axis=1).mean() == pytest.approx(seen_with, abs=0.015)
        assert verdict == ("as cold" if seen_with >= 0.9 else "cannot tell")
        if more:
            assert judged(0, hits + more, seen)[0] == "as cold"
            assert judged(0, hits + more - 1, seen)[0] == "cannot tell"


def test_one_wrong_hit_is_enough_and_a_blind_witness_says_nothing() -> None:
    assert judged(1, 90, 1.0)[0] == "differs" and judged(0, 0, 1.0)[0] == "not shown"
    assert judged(0, 10_000, 0.0) == ("cannot tell", 0.0, 0)
    assert limit([0.0, 0.0]) == 0.005 and limit([0.0, 0.02]) == pytest.approx(0.08)


def test_a_lost_number_is_far() -> None:
    """The digits of a number that the prompt says are sure: whatever else an answer begins with lies far from them."""
    number = Answer([4, 8, 2], [{4: -1e-4, 7: -9.5}, {8: -1e-3, 1: -7.0}, {2: -1e-3, 3: -7.5}])
    lost = Answer([9, 8, 2], [{9: -0.9, 4: -1.1}, {8: -0.2, 1: -2.0}, {2: -0.1, 3: -3.0}])
    assert distance(number, lost) > 2.0


def test_a_wrong_hit_that_noise_may_give_is_no_fault() -> None:
    assert judged(1, 90, 1.0, False)[0] == judged(1, 2, 1.0, False)[0] == "cannot tell"


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_what_chance_gives_is_not_named(rate: float) -> None:
    """Wrong hits that nothing tells from the others: a feature is named in fewer than 5 % of checks."""
    draw, named = np.random.default_rng(1), 0
    for _ in range(40):
        hits = [
            (
                {"path": "abcdef"[n % 6], "hit": n % 37, "hit mod 16": n % 16, "number": n // 6},
                draw.random() < rate,
            )
            for n in range(192)
        ]
        named += bool(common(hits))
    assert named <= 3


def test_what_tells_wrong_hits_is_named_with_the_hits_that_it_does_not_explain() -> None:
    hits = [({"the path is": "abcdef"[n % 6], "hit mod 16": n % 16}, n % 16 > 12) for n in range(96)]
    assert common(hits) == "all where hit mod 16 at least 13"
    hits[0] = (hits[0][0], True)
    assert common(hits) == "18 where hit mod 16 at least 13"
    assert common([]) == common([(each, False) for each, _ in hits]) == ""
