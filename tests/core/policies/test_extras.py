"""Windows that stock would not keep: first to go but for what hits used, then by what they cost."""

from __future__ import annotations

from collections.abc import Iterator

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
    REGRET,
    SWITCH,
    Account,
    Left,
    Near,
    Outputs,
)
from kvtune.core.policies.guard import SMALL
from kvtune.core.policies.placing import FAR_TIER, NEAR_TIER, OUTPUT_TIER, REUSED, SINGLE
from tests.core.policies.pool import Pool

BLOCKS, LARGE = 640, 20_000
EVERY_GROUP = frozenset(b"%04d" % number for number in range(10_000))


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


class Windows(Pool):
    """A pool whose blocks are all a window group's."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.window_groups = EVERY_GROUP
        self.keys: Iterator[int] = iter(range(10**6, 10**9))

    def add(self, grade: int = 0, key: int | None = None) -> int:
        """A new block of that grade, which becomes free; its key."""
        key = next(self.keys) if key is None else key
        block = self.take()
        self.holds[key], self.key_of[block], self.grade_of[block] = block, key, grade
        self.policy.stored([block], [b"%032d" % key], False, False)
        self.queues[self.policy.place([block])[0]][block] = None
        return key


@pytest.fixture
def pool() -> Windows:
    return Windows(BLOCKS)


def fill(pool: Windows, grade: int) -> tuple[list[int], list[int]]:
    """Ordinary blocks, then as many of the grade, until the pool is full."""
    ordinary = [pool.add() for _ in range(BLOCKS // 2)]
    return ordinary, [pool.add(grade) for _ in range(BLOCKS - BLOCKS // 2)]


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


def go_on_behind(pool: Windows, key: int) -> int:
    """A prompt hits this block, its conversation went on there, and it ends; the block's tier."""
    block = pool.holds[key]
    for queue in pool.queues:
        queue.pop(block, None)
    pool.policy.hit([block])
    pool.policy.retired([block])
    (tier,) = pool.policy.place([block])
    pool.queues[tier][block] = None
    return tier


def let_go_of(pool: Windows, count: int) -> None:
    """So many windows behind which conversations went on are evicted, and nobody asks for them."""
    for _ in range(count):
        go_on_behind(pool, pool.add())
    for _ in range(BLOCKS + count):
        pool.add()


def test_where_a_conversation_went_on_a_window_goes_by_age_until_many_were_not_asked_for(
    pool: Windows,
) -> None:
    let_go_of(pool, FEWEST)
    assert go_on_behind(pool, pool.add()) == SINGLE, "as with stock"
    let_go_of(pool, 1)
    left, before = pool.add(), pool.policy.left.turns
    assert go_on_behind(pool, left) == FAR_TIER and before == 1
    pool.add()
    assert left not in pool.holds, "it went before all others, which are older"


@pytest.mark.parametrize("grade", [NEAR, OUTPUT, OUTPUT_END])
def test_where_a_conversation_went_on_what_stock_would_not_keep_goes_first_at_once(
    pool: Windows, grade: int
) -> None:
    assert go_on_behind(pool, pool.add(grade)) == FAR_TIER


def test_prompts_that_are_sent_again_keep_their_windows_as_with_stock(pool: Windows) -> None:
    """A search by hand: chats whose every turn was answered twice lost 29 points."""
    for _ in range(8):
        left = pool.add()
        go_on_behind(pool, left)
        pool.ask(left)
    let_go_of(pool, FEWEST + 1)
    assert go_on_behind(pool, pool.add()) == SINGLE
    assert pool.policy.left.balance == -8 * REGRET + FEWEST + 1


def look(pool: Windows) -> None:
    pool.policy.stale = True
    pool.add()


def test_where_prompts_are_sent_again_outputs_have_no_room(pool: Windows) -> None:
    fill(pool, OUTPUT_END)
    pool.policy.resumed(100, 60, OUTPUT_END)
    look(pool)
    assert pool.policy.output.room == BLOCKS
    pool.policy.left.came_again(FEWEST)
    look(pool)
    assert pool.policy.output.by_age and pool.policy.output.room == 0


def went_on(pool: Windows, windows: int) -> Outputs:
    """A full pool with so many of outputs' windows, evicted by age, when it is known that next turns come."""
    for _ in range(BLOCKS):
        pool.add()
    output: Outputs = pool.policy.output
    output.earn(60)
    for _ in range(windows):
        pool.add(OUTPUT_END)
    assert pool.size(OUTPUT_TIER) == windows
    pool.policy.left.weigh(BLOCKS)
    return output


def test_where_conversations_go_on_outputs_have_room_for_what_their_windows_gave_back(pool: Windows) -> None:
    output = went_on(pool, 10)
    look(pool)
    assert (output.room, pool.size(OUTPUT_TIER)) == (10, 10), "those that are there keep their place"
    for _ in range(7):
        go_on_behind(pool, pool.add())
        pool.add()
    assert output.room == 17, "each of the seven went first"
    for _ in range(7):
        pool.add(OUTPUT_END)
    oldest = next(iter(pool.queues[OUTPUT_TIER]))
    newest = [pool.add(OUTPUT_END) for _ in range(5)]
    assert pool.size(OUTPUT_TIER) > output.room
    for _ in range(5):
        pool.add()
    assert pool.size(OUTPUT_TIER) == 17 and oldest in pool.queues[OUTPUT_TIER]
    assert not any(key in pool.holds for key in newest), "the newest go first"
    ordinary = pool.size(SINGLE)
    pool.add(OUTPUT_END)
    assert pool.size(SINGLE) == ordinary - 1, "then the oldest of all"


def test_what_was_given_back_is_forgotten_when_stock_would_have_evicted_it_too(pool: Windows) -> None:
    output = went_on(pool, 0)
    look(pool)
    for _ in range(20):
        go_on_behind(pool, pool.add())
    for _ in range(20):
        pool.add()
    look(pool)
    assert output.room == 20
    for _ in range(int(1.2 * BLOCKS)):
        pool.add()
    look(pool)
    assert output.by_age and output.room == 0


def test_once_prompts_are_sent_again_outputs_have_no_more_room_than_they_take(pool: Windows) -> None:
    """Those that are there stay: some conversations have no other window by then, and 37 chats lost 4.5 points."""
    output = went_on(pool, 10)
    look(pool)
    output.give_back(int(pool.policy.ages.epoch))
    assert output.room == 11
    pool.policy.left.came_again(BLOCKS)
    look(pool)
    assert output.by_age and output.room == pool.size(OUTPUT_TIER) == 10
    for _ in range(int(1.2 * BLOCKS)):
        pool.add()
    look(pool)
    assert output.by_age and output.room == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(("give", "look", "turn", "back", "add")), st.integers(0, 100)), max_size=60
    )
)
def test_outputs_and_windows_left_take_no_more_than_stock_takes(steps: list[tuple[str, int]]) -> None:
    """From the moment at which it is known that next turns come: what was there then, and what was given back since."""
    output, left, epoch, reach = Outputs(LARGE), Left(LARGE), 1, 0.0
    output.earn(1e9)
    size = allowed = 0
    for name, number in steps:
        if name == "give" and output.gives_back:
            output.give_back(epoch)
            allowed += 1
        elif name == "add":
            size = min(size + number, output.room) if output.known else size + number
        elif name in ("turn", "back"):
            left.weigh(1e9 if name == "turn" else -1e9)
        epoch, reach = epoch + 1, max(reach, epoch - number)
        if name == "look":
            before = output.gives_back
            output.learn(left, size, epoch, reach)
            output.look(size)
            if left.turned != before:
                allowed = size
        if output.known:
            assert output.room <= allowed
            assert output.room == sum(output.given_back.values())
        else:
            assert output.room == LARGE


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_the_window_at_a_prompts_own_end_goes_first_only_where_the_outputs_has_room(
    pool: Windows, known: bool, room: bool
) -> None:
    """It begins in the window that the prompt was resumed in. Without the output's the next turn resumes there."""
    if known:
        output = went_on(pool, 0)
        look(pool)
        output.given_back = {}
        for _ in range(room):
            output.give_back(output.blocks)
        output.allowed = int(room)
        output.look(0)
    block = pool.holds[pool.add()]
    del pool.queues[SINGLE][block]
    pool.policy.hit([block])
    pool.policy.retired([block])
    pool.policy.needed([block])
    pool.policy.needed([block])
    (tier,) = pool.policy.place([block])
    assert tier == (SINGLE if not known else FAR_TIER if room else REUSED)


def test_where_a_conversation_went_on_before_an_outputs_window_is_still_a_matter_of_its_account(
    pool: Windows,
) -> None:
    """Kept as if it was hit, it cost 38 of 400 loads of chats up to 4 points."""
    ended = pool.holds[pool.add(OUTPUT_END)]
    pool.policy.expected([ended])
    assert pool.policy.place([ended]) == [OUTPUT_TIER]
    inside = pool.holds[pool.add()]
    pool.policy.expected([inside])
    assert pool.policy.place([inside]) == [REUSED]


def test_one_that_went_first_and_is_missed_ends_it(pool: Windows) -> None:
    let_go_of(pool, 2 * FEWEST)
    left = pool.add()
    assert go_on_behind(pool, left) == FAR_TIER
    pool.add()
    assert left not in pool.holds
    pool.add(key=left)
    assert go_on_behind(pool, pool.add()) == SINGLE
    let_go_of(pool, 2 * FEWEST)
    assert go_on_behind(pool, pool.add()) == SINGLE, "and for long"


def test_what_is_missed_long_after_age_would_have_lost_it_too_ends_nothing(pool: Windows) -> None:
    let_go_of(pool, 2 * FEWEST)
    left = pool.add()
    go_on_behind(pool, left)
    for _ in range(int(1.5 * BLOCKS)):
        pool.add()
    pool.add(key=left)
    assert pool.policy.left.turned


def test_the_balance_of_windows_left_stays_within_its_limits() -> None:
    left = Left(LARGE)
    left.came_again(10**9)
    assert left.balance == -REGRET * MOST * SWITCH * LARGE
    for _ in range(10 * LARGE):
        left.ended()
    assert left.turned and left.balance == MOST * SWITCH * LARGE
    left.missed()
    assert not left.turned and left.balance == -REGRET * MOST * SWITCH * LARGE
