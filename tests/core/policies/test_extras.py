"""Windows that stock would not keep: first to go but for what hits used, then by what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.policies import NEAR, OUTPUT, OUTPUT_END
from kvtune.core.policies.extras import (
    A_PROMISE,
    FEWEST,
    FORGOTTEN,
    MOST,
    PROMISED,
    SWITCH,
    Account,
    Near,
)
from kvtune.core.policies.guard import SMALL
from kvtune.core.policies.placing import NEAR_TIER, OUTPUT_TIER, REUSED
from tests.core.policies.pool import BLOCKS, Windows, fill

LARGE = 20_000


def test_an_account_turns_at_its_limits_and_holds_no_more_than_that() -> None:
    account = Account(LARGE)
    switch = SWITCH * LARGE
    account.add(switch)
    assert not account.by_age
    account.add(1)
    assert account.by_age and account.turns == 1
    account.add(1e9)
    account.add(-MOST * switch - switch)
    assert account.by_age, "as much as it held, and its limit: not below it"
    account.add(-1)
    assert not account.by_age and account.turns == 2


@pytest.mark.parametrize(("blocks", "switch"), [(80, 10), (800, FEWEST), (LARGE, SWITCH * LARGE)])
def test_in_a_small_pool_a_prompt_or_two_turn_nothing(blocks: int, switch: float) -> None:
    assert Account(blocks).switch == switch


def test_the_room_is_what_was_won_and_for_a_promise_what_a_history_lends() -> None:
    account = Near(LARGE)
    account.add(300)
    assert account.by_age and account.room == 0, "a promise alone gives no room"
    account.earn(200)
    assert account.room == 200
    account.lent = 1500
    account.look(1000)
    promised = 500 * (1 - FORGOTTEN)
    assert account.room == int(200 + A_PROMISE * promised), "each look forgets some of a promise"
    account.add(1e9)
    assert account.room == 200 + 1500 < 200 + A_PROMISE * PROMISED * LARGE
    for _ in range(10_000):
        account.look(1000)
    assert account.by_age and account.room == 200, "what was won stays"
    account.earn(1e9)
    assert account.room == LARGE, "the pool at most"


def test_what_they_pushed_out_costs_them_their_room() -> None:
    account = Near(LARGE)
    account.earn(200)
    account.cost = 300
    account.charge()
    assert (account.room, account.cost) == (0, 0)


def test_a_look_says_whether_all_of_them_are_evicted_by_age() -> None:
    account = Near(LARGE)
    account.look(0)
    assert (account.full, account.held) == (False, 0), "none of them is"
    account.earn(500)
    account.look(200)
    assert (account.full, account.held) == (True, 0)
    account.look(5000)
    assert (account.full, account.held) == (False, account.room)


@given(st.lists(st.tuples(st.sampled_from(("add", "earn", "look", "lend")), st.integers(-30_000, 30_000))))
def test_the_room_is_never_more_than_was_won_and_lent(steps: list[tuple[str, int]]) -> None:
    account, best = Near(LARGE), 0.0
    for name, blocks in steps:
        if name == "lend":
            account.lent = max(account.lent, blocks)
            continue
        if name == "look":
            account.look(abs(blocks))
        else:
            getattr(account, name)(blocks)
            best += max(blocks, 0) if name == "earn" else 0
        assert 0 <= account.room <= min(LARGE, best + account.lent)
        assert account.by_age or not account.room


@pytest.fixture
def pool() -> Windows:
    return Windows(BLOCKS)


@pytest.mark.parametrize(
    ("grade", "tier"), [(NEAR, NEAR_TIER), (OUTPUT, OUTPUT_TIER), (OUTPUT_END, OUTPUT_TIER)]
)
def test_extra_windows_go_first_though_they_are_younger(pool: Windows, grade: int, tier: int) -> None:
    ordinary, extra = fill(pool, grade)
    assert pool.size(tier) == len(extra)
    for _ in extra:
        pool.add()
    assert not pool.size(tier) and all(key in pool.holds for key in ordinary)


@pytest.mark.parametrize(("grade", "kept"), [(NEAR, 0), (OUTPUT_END, 8)])
def test_hits_that_use_them_give_them_their_place_by_age_at_once(
    pool: Windows, grade: int, kept: int
) -> None:
    ordinary, extra = fill(pool, grade)
    for _ in range(320 // (kept or 40)):
        pool.policy.resumed(40, kept, grade)
    for _ in range(100):
        pool.add()
    assert not any(key in pool.holds for key in ordinary[:100]), "the oldest are ordinary"
    assert all(key in pool.holds for key in extra)


def test_few_hits_give_few_of_them_a_place(pool: Windows) -> None:
    """A search found loads on which all of them had one at once: prompts that just fit lost 3.9 points for it."""
    ordinary, extra = fill(pool, NEAR)
    pool.policy.resumed(60, 0, NEAR)
    room = pool.policy.near.room
    assert room == 60
    for _ in range(len(extra) + 100):
        pool.add()
    held = [key in pool.holds for key in extra]
    assert not any(held[:-room]) and sum(held) == pool.policy.near.room, "the newest of them"
    assert not any(key in pool.holds for key in ordinary[: 100 - room]), "then the oldest of all"


@pytest.mark.parametrize("hits", [1, 8])
def test_windows_that_were_evicted_give_them_room_once_prompts_miss_them(pool: Windows, hits: int) -> None:
    """Whether none has a room yet or those that have are too few."""
    pool.policy.guard.history = 40 * SMALL
    prompt = [pool.add(key=10_000 * number) for number in range(100, 160)]
    window = pool.add(NEAR, key=990_001)
    if hits > 1:
        pool.policy.resumed(hits, 0, NEAR)
    while window in pool.holds:
        pool.add(NEAR)
    before = pool.policy.near.room
    for key in prompt:
        compute_again(pool, key)
    pool.add(NEAR, key=window)
    assert pool.policy.near.room >= before + 20


def test_they_go_first_again_once_ordinary_blocks_come_back_that_they_pushed_out(pool: Windows) -> None:
    ordinary, extra = fill(pool, NEAR)
    pool.policy.resumed(400, 0, NEAR)
    assert pool.policy.near.room
    while ordinary[179] in pool.holds:
        pool.add()
    assert pool.policy.near.room
    for key in ordinary[:180]:
        pool.add(key=key)
    assert not pool.policy.near.room
    left = sum(key in pool.holds for key in extra)
    held = [key for key in ordinary if key in pool.holds]
    for _ in range(10):
        pool.add()
    assert sum(key in pool.holds for key in extra) == left - 10
    assert all(key in pool.holds for key in held)


def test_what_comes_back_costs_nothing_where_it_could_not_have_been_used_without_them(pool: Windows) -> None:
    ordinary, _ = fill(pool, NEAR)
    pool.policy.resumed(100, 0, NEAR)
    pool.window_groups = frozenset((b"none",))
    while ordinary[59] in pool.holds:
        pool.add()
    for key in ordinary[:60]:
        pool.add(key=key)
    assert pool.policy.near.by_age, "no ordinary window came back with them"


def compute_again(pool: Windows, key: int, anyway: bool = False) -> int:
    """A free block's content is stored once more, by a prompt that could not use it or `anyway`; its tier now."""
    old = pool.holds[key]
    for queue in pool.queues:
        queue.pop(old, None)
    pool.policy.replaced(old, anyway)
    del pool.key_of[old]
    block = pool.take()
    pool.blank.append(old)
    pool.holds[key], pool.key_of[block] = block, key
    pool.grade_of[block], pool.grade_of[old] = pool.grade_of[old], 0
    pool.policy.stored([block], [b"%032d" % key], True, anyway)
    (tier,) = pool.policy.place([block])
    pool.queues[tier][block] = None
    return tier


def test_outputs_get_a_place_by_age_once_their_prompts_next_turn_is_computed_again(pool: Windows) -> None:
    """Keys of one block in two groups differ in their last four bytes."""
    turn = [pool.add(key=number * 10_000) for number in range(100, 160)]
    ended = pool.add(OUTPUT_END, key=159 * 10_000 + 1)
    while ended in pool.holds:
        pool.add()
    assert all(key in pool.holds for key in turn)
    for key in turn[:-1]:
        compute_again(pool, key)
    assert not pool.policy.output.by_age, "not where the output ended"
    compute_again(pool, turn[-1])
    assert pool.policy.output.by_age


def test_a_block_inside_an_outputs_window_is_no_place_to_resume(pool: Windows) -> None:
    """The window of a short output holds the end of its prompt: a search found loads that lost 5.7 points for it."""
    turn = [pool.add(key=number * 10_000) for number in range(100, 140)]
    inside = pool.add(OUTPUT, key=139 * 10_000 + 1)
    while inside in pool.holds:
        pool.add()
    for key in turn:
        compute_again(pool, key)
    assert not pool.policy.output.by_age
    pool.add(key=inside)
    assert not pool.policy.near.by_age and not pool.policy.output.by_age


def test_what_is_computed_anyway_is_no_sign_that_an_outputs_window_was_missed(pool: Windows) -> None:
    """A prompt that repeats: its last token is computed though all of it is cached, and its output is the same."""
    turn = [pool.add(key=number * 10_000) for number in range(100, 140)]
    ended = pool.add(OUTPUT_END, key=139 * 10_000 + 1)
    while ended in pool.holds:
        pool.add()
    for key in turn:
        compute_again(pool, key, anyway=True)
    assert not pool.policy.output.by_age and not pool.policy.output.useless


@pytest.mark.parametrize("grade", [OUTPUT, OUTPUT_END])
def test_an_output_that_is_the_same_again_leaves_its_window_where_it_was(pool: Windows, grade: int) -> None:
    """As blocks that were hit they would push out what stock keeps."""
    key = pool.add(grade)
    assert compute_again(pool, key, anyway=True) == OUTPUT_TIER
    assert compute_again(pool, pool.add(grade)) == REUSED
