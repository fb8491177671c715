"""The default policy: what it keeps, what it costs, and that it is not worse than plain age."""

from __future__ import annotations

import random
import sys
from array import array
from collections import OrderedDict, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.policies.ages import EPOCHS_A_POOL, Ages
from kvtune.core.policies.density import Density
from kvtune.core.policies.guard import LENT, TRUSTED_AFTER
from kvtune.core.policies.placing import ONCE
from kvtune.core.policies.remembered import Remembered
from kvtune.core.settings import CoreSettings
from tests.core.policies.pool import Pool


def by_age(keys: list[int], blocks: int) -> int:
    """What least recently used hits."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in keys:
        hits += key in held
        held[key] = None
        held.move_to_end(key)
        if len(held) > blocks:
            held.popitem(last=False)
    return hits


def asked(kind: str, seed: int, count: int) -> list[int]:
    chance = random.Random(f"{kind}/{seed}")
    fresh = iter(range(10**6, 10**9))
    if kind == "popular":
        return [int(chance.paretovariate(0.7)) for _ in range(count)]
    if kind == "pairs":
        return [number // 2 if number % 2 else number // 2 + 60 for number in range(count)]
    if kind == "phases":
        return [number // 1500 * 1000 + chance.randrange(120) for number in range(count)]
    if kind == "hot and cold":
        return [chance.randrange(60) if chance.random() < 0.5 else next(fresh) for _ in range(count)]
    return [number % 130 for number in range(count)]


KINDS = ("popular", "pairs", "phases", "hot and cold", "in turn")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_it_hits_no_less_than_age_but_for_one_in_a_hundred_asked(kind: str, seed: int) -> None:
    keys = asked(kind, seed, 12_000)
    pool = Pool(100)
    for key in keys:
        pool.ask(key)
    assert pool.hits >= by_age(keys, 100) - 0.01 * len(keys)


@pytest.mark.parametrize("seed", [7, 155, 238, 339, 554, 670])
def test_loads_that_turn_cost_no_more_than_the_share_that_is_lent(seed: int) -> None:
    """Some kinds one after another, laps among them that just fit: the worst of 1,001 such loads."""
    chance = random.Random(seed)
    blocks = chance.choice([60, 100, 200, 400])
    keys: list[int] = []
    for part in range(chance.randrange(2, 6)):
        kind, count = chance.choice((*KINDS, "laps", "laps")), chance.randrange(1000, 8000)
        lap = int(blocks * chance.uniform(0.85, 1.02)) if kind == "laps" else 0
        more = [number % lap for number in range(count)] if lap else asked(kind, seed, count)
        keys += [(part + 1) * 10**10 + key for key in more]
    pool = Pool(blocks)
    for key in keys:
        pool.ask(key)
    lent = max(LENT, min(len(keys) / blocks, TRUSTED_AFTER) / TRUSTED_AFTER**2)
    assert pool.policy.guard.turns > 0
    assert pool.hits >= by_age(keys, blocks) - lent * len(keys)


def test_it_hits_more_than_age_where_cold_prompts_push_out_hot_ones() -> None:
    keys = asked("hot and cold", 1, 6000)
    pool = Pool(100)
    for key in keys:
        pool.ask(key)
    assert pool.hits > 1.15 * by_age(keys, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_without_reuse_it_is_plain_age(kind: str) -> None:
    keys = asked(kind, 0, 3000)
    pool = Pool(100, reuse=False)
    for key in keys:
        pool.ask(key)
    assert pool.hits == by_age(keys, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_in_plain_age_the_account_sees_no_difference(kind: str) -> None:
    """What it believes that age would have hit is what age hits, but for the epoch in which age ends."""
    keys = asked(kind, 2, 6000)
    pool = Pool(320, reuse=False)
    booked = [0, 0]
    settle = pool.policy.guard.settle

    def booking() -> None:
        booked[0] += pool.policy.guard.won
        booked[1] += pool.policy.guard.lost
        settle()

    pool.policy.guard.settle = booking  # type: ignore[method-assign]
    for key in keys:
        pool.ask(key)
    assert max(booked) <= 0.02 * len(keys)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), min_size=1, max_size=400))
def test_age_reaches_back_as_far_as_counting_says(events: list[tuple[bool, int]]) -> None:
    """Blocks become free and are asked for again, in epochs of one block: the reach is exact."""
    ages = Ages(EPOCHS_A_POOL)
    free: list[int] = []
    for comes, which in events:
        if comes or not free:
            ages.came(which % 2, 1)
            free.append((ages.epoch << 1) + which % 2)
            ages.tick()
        else:
            one = free.pop(which % len(free))
            ages.hit(one & 1, one >> 1)
    epochs = sorted((one >> 1 for one in free), reverse=True)
    for blocks in range(len(epochs)):
        if ages.epoch - epochs[blocks] < 255:
            assert ages.reach(blocks) == epochs[blocks] + 1


def test_the_value_of_an_age_is_hits_over_time_until_the_best_horizon() -> None:
    ages = Ages(320)
    for _ in range(250):
        ages.came(0, 100)
        if ages.epoch > 5:
            for _ in range(50):
                ages.hit(0, ages.epoch - 5)
        ages.tick()
    young, before, after = (ages.value(0, ages.epoch - age) for age in (0, 4, 7))
    assert young < before and after < before / 4
    assert ages.value(1, ages.epoch) == 0.0


MARKS = st.lists(st.integers(0, 30), max_size=200)


@given(st.integers(0, 12), MARKS)
def test_the_last_evicted_ones_are_remembered_and_no_others(size: int, marks: list[int]) -> None:
    forgotten = [0]

    def forget(kind: int, epoch: int) -> None:
        forgotten[0] += 1

    ghost, last = Remembered(size, forget), deque[int](maxlen=size)
    for mark in marks:
        ghost.add(mark, 0, 7)
        last.append(mark)
    assert forgotten[0] == max(0, len(marks) - size)
    for mark in range(31):
        assert ghost.take(mark) == ((0, 7) if mark in last else None)
        assert ghost.take(mark) is None


def test_a_pool_that_prefers_reused_blocks_holds_as_many() -> None:
    ages = Ages(3200)
    for epoch in range(90):
        reused = 20 + epoch // 3
        ages.came(0, 100 - reused)
        ages.came(1, reused)
        ages.tick()
    reach = ages.reach(3000)
    single_since, reused_since = ages.traded(reach)

    def held(kind: int, since: int) -> int:
        return sum(ages.left[kind][epoch & 255] for epoch in range(since, ages.epoch + 1))

    assert reused_since < reach < single_since
    assert ages.epoch - reused_since <= 2 * (ages.epoch - reach) + 2
    assert abs(held(0, single_since) + held(1, reused_since) - 3000) <= 200


def test_it_takes_at_most_forty_bytes_a_block() -> None:
    """The two bytes that the pool itself keeps of a block included; the tables of ages are of one size."""
    blocks = 200_000
    pool = Pool(0)
    pool.num_blocks = blocks
    policy = Density(pool, CoreSettings())
    held: list[Any] = [policy.use, policy.freed_at, policy.mark_of]
    ghost = policy.remembered
    held += [ghost.marks, ghost.older, ghost.first, ghost.epochs, ghost.kinds]
    every = [v for of in (policy, ghost) for v in vars(of).values() if isinstance(v, array | bytearray)]
    assert len(every) == len(held)
    assert sum(map(sys.getsizeof, held)) / blocks + 2 <= 40
    assert sum(len(counts) for lists in (policy.ages.left, policy.ages.hits) for counts in lists) < 1200


def test_a_reset_forgets_all() -> None:
    pool = Pool(50)
    for key in asked("popular", 0, 500):
        pool.ask(key)
    pool.policy.reset()
    assert set(pool.policy.use) == {ONCE} and not any(pool.policy.freed_at)
    assert not any(map(any, pool.policy.ages.left))
