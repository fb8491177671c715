"""When a tier of host memory admits by reuse, and when it goes by age again."""

from __future__ import annotations

from kvtune.core.offload.duel import Duel


def keys(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_it_begins_by_age_and_leaves_it_only_on_evidence() -> None:
    duel = Duel(100)
    duel.asked_again(5, 0)
    assert duel.by_age
    duel.asked_again(1, 0)
    assert not duel.by_age and duel.turns == 1


def test_hits_that_reuse_would_not_have_had_speak_against_it() -> None:
    duel = Duel(100)
    for _ in range(20):
        duel.asked_again(3, 3)
    assert duel.by_age


def by_reuse(capacity: int) -> Duel:
    duel = Duel(capacity)
    duel.asked_again(capacity, 0)
    assert not duel.by_age
    return duel


def test_what_age_had_and_the_tier_missed_turns_it_back() -> None:
    duel = by_reuse(100)
    duel.settle(keys(*range(10)), 0, [])  # nothing had them
    assert not duel.by_age
    duel.settle(keys(*range(10)), 0, [])  # age has them now
    assert duel.by_age


def test_hits_in_the_pool_are_no_ones() -> None:
    duel = by_reuse(100)
    for _ in range(5):
        duel.settle(keys(*range(10)), 10, [])
    assert not duel.by_age


def test_behind_a_chunk_that_age_lacks_nothing_counts_as_lost() -> None:
    duel = by_reuse(100)
    duel.settle(keys(*range(1, 10)), 0, [])
    duel.settle(keys(0, *range(1, 10)), 0, [])
    assert not duel.by_age


def test_hits_that_age_has_lost_are_won_and_pay_for_later_losses() -> None:
    duel = by_reuse(10)
    duel.settle(keys(*range(10)), 0, [])
    duel.settle(keys(*range(10, 20)), 0, [])  # age's list holds ten chunks
    before = duel.balance
    duel.settle(keys(0, 1), 0, keys(0, 1))
    assert duel.balance > before + 1
    assert len(duel._lru) == 10
