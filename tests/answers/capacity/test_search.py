"""The search on curves that are given: what it finds, and with how few replays."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtune.answers.capacity.search import CLOSE, ENOUGH_SEEDS, LEAST_SEEDS, LINEAR, Search, Searches
from tests.capacities import Curve, smooth

LINE, MOST = 0.9, 512


def searched(
    curve: Curve,
    first: int = 16,
    *,
    seeds: int = 3,
    most: int = MOST,
    further: bool = True,
    requests: Callable[[int], int] = lambda sessions: 1000,
) -> tuple[Searches, list[tuple[int, int]]]:
    """Search with two replays at once, the smaller of which ends first; return the searches, and all replays."""
    searches = Searches(LINE, most, first, seeds)
    running: list[tuple[int, int]] = []
    made: list[tuple[int, int]] = []
    while True:
        while len(running) < 2 and (wanted := searches.next(further)) is not None:
            assert wanted not in made and 1 <= wanted[0] <= most
            running.append(wanted)
            made.append(wanted)
        if not running:
            return searches, made
        running.remove(ended := min(running))
        sessions, seed = ended
        searches.add(seed, sessions, curve(sessions, seed), requests(sessions))


def most_of(curve: Curve, seed: int) -> int:
    """The largest number from which on, downwards, all keep."""
    return next((n - 1 for n in range(1, MOST + 1) if curve(n, seed) < LINE), MOST)


@pytest.mark.parametrize("first", [4, 7, 16, 60])
@pytest.mark.parametrize(
    ("sessions", "power", "spread"), [(6.5, 1.2, 0.1), (17.0, 1.0, 0.2), (31.0, 1.5, 0.1), (40.0, 3.0, 0.05)]
)
def test_each_seeds_number_is_found_to_a_point(
    sessions: float, power: float, spread: float, first: int
) -> None:
    curve = smooth(sessions, power, spread=spread)
    searches, made = searched(curve, first)
    for seed, number in enumerate(searches.range.by_seed):
        off = 2 * CLOSE if searches.by_seed[seed].is_found() else LINEAR
        assert curve(max(1, number), seed) > LINE - off and curve(number + 1, seed) < LINE + off
    assert len(made) <= 20 and sum(n for n, _ in made) <= 16 * max(sessions, first)


def test_replays_that_waver_by_a_point_do_not_mislead_it() -> None:
    curve = smooth(31.0, 1.5, noise=0.005, spread=0.1)
    searches, made = searched(curve)
    clean = [most_of(smooth(31.0, 1.5, spread=0.1), seed) for seed in range(len(searches.numbers))]
    assert all(abs(number - n) <= 4 for number, n in zip(searches.numbers, clean, strict=True))
    assert len(made) <= 14


def test_where_hits_fall_off_a_cliff_it_is_found_to_a_session() -> None:
    searches, made = searched(lambda n, seed: 0.99 if n <= 40 + seed % 3 else 0.3)
    assert searches.numbers[0] == 40
    assert all(abs(number - 40 - seed % 3) <= 2 for seed, number in enumerate(searches.numbers))
    assert 36 <= searches.range.low < 40 and 42 < searches.range.high <= 46
    assert len(made) <= 30


def test_a_flat_curve_ends_it_and_the_range_is_wide() -> None:
    def flat(sessions: float, seed: int) -> float:
        return LINE + random.Random(f"{sessions} {seed}").uniform(-0.015, 0.015)

    searches, made = searched(flat)
    assert len(made) <= 3 * ENOUGH_SEEDS and searches.range.high > 1.3 * searches.range.low


def test_all_keep_and_none_keeps_are_said() -> None:
    searches, made = searched(lambda n, seed: 0.97)
    assert searches.range.low == searches.range.high == MOST + 1
    assert {seed for _, seed in made} == {0, 1, 2}, "more seeds say nothing"
    searches, made = searched(lambda n, seed: 0.5)
    assert searches.range.low == searches.range.high == 0 and max(n for n, _ in made) == 16


def test_few_requests_say_nothing() -> None:
    """Up to 5 sessions measure too few, and would keep too little by accident."""
    curve = smooth(17.0)
    searches, _ = searched(
        lambda n, seed: 0.89 if n < 6 else curve(n, seed), 4, requests=lambda sessions: 10 * sessions
    )
    assert searches.range.low > 10


def test_a_replay_within_a_point_of_the_line_ends_a_seeds_search() -> None:
    search = Search(LINE, MOST, {16: 0.97})
    assert not search.is_found() and 16 < search.next(0.0, 0.0) <= 32
    search.shares[20] = 0.908
    assert search.is_found() and search.number(0.004) == 22
    between = Search(LINE, MOST, {16: 0.94, 24: 0.88})
    assert between.is_found() and between.number(0.0) == 21, "read off between two replays"


def test_growth_is_at_most_twofold_and_follows_what_was_lost() -> None:
    assert Search(LINE, MOST, {16: 0.999}).next(0.0, 0.0) == 32
    assert 16 < Search(LINE, MOST, {16: 0.92}).next(0.0, 0.0) <= 18
    assert Search(LINE, MOST, {16: 0.999, 32: 0.998}).next(0.0, 0.0) == 64
    assert Search(LINE, MOST, {16: 0.4}).next(0.0, 0.0) == 8
    assert Search(LINE, MOST, {16: 0.96, 32: 0.93}).next(0.0, 0.0) == 46, "by a line, from none at the least"


def test_others_begin_where_the_first_crosses_and_one_near_the_line_is_replayed_once() -> None:
    curve = smooth(31.0, 1.5, spread=0.1)
    searches, made = searched(curve)
    further = [n for n, seed in made if seed >= searches.seeds]
    assert further and all(abs(n - searches.usual) <= 3 for n in further)
    assert len(further) == len({seed for _, seed in made if seed >= searches.seeds})


def test_more_seeds_are_replayed_while_they_narrow_the_range_and_there_is_time() -> None:
    found = searched(smooth(31.0))[0]
    assert len(found.numbers) == ENOUGH_SEEDS
    hurried = searched(smooth(31.0), further=False)[0]
    assert len(hurried.numbers) == LEAST_SEEDS
    assert hurried.range.high / hurried.range.low > found.range.high / found.range.low
    assert len(searched(smooth(31.0), seeds=12)[0].numbers) == 12


@pytest.mark.parametrize("of", [(6.5, 1.2, 0.15), (14.0, 1.3, 0.25), (31.0, 1.0, 0.15), (36.0, 2.0, 0.1)])
def test_at_the_low_end_other_seeds_keep_and_at_the_high_end_they_do_not(
    of: tuple[float, float, float],
) -> None:
    """Seeds that the search did not use: with nine tenths, five of five hold."""
    curve = smooth(of[0], of[1], noise=0.003, spread=of[2])
    searches, _ = searched(curve, 12)
    others = range(100, 200)
    assert sum(curve(searches.range.low, seed) >= LINE for seed in others) >= 95
    assert sum(curve(searches.range.high, seed) < LINE for seed in others) >= 95
