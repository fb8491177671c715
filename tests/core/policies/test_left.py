"""Windows behind which conversations went on, and the room that they give to outputs' windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.policies import NEAR, OUTPUT, OUTPUT_END
from kvtune.core.policies.extras import FEWEST, MOST, REGRET, SWITCH, Left, Outputs
from kvtune.core.policies.placing import FAR_TIER, OUTPUT_TIER, REUSED, SINGLE
from tests.core.policies.pool import BLOCKS, Windows, fill

LARGE = 20_000


@pytest.fixture
def pool() -> Windows:
    return Windows(BLOCKS)


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
