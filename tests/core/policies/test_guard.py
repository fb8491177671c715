"""When the default policy leaves the order of age, and what that may cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.policies.guard import (
    EVIDENCE,
    FEWEST,
    LEAST,
    LENT,
    MOST,
    SMALL,
    START,
    TOLERATED,
    TRUSTED_AFTER,
    TRUSTED_AFTER_WITH_WINDOWS,
    Guard,
)
from tests.core.policies.pool import Pool


def book(guard: Guard, won: int, lost: int, asked: int, promised: int) -> None:
    """An epoch of the guard's."""
    guard.won, guard.lost, guard.asked, guard.promised = won, lost, asked, promised
    guard.settle()
    assert guard.won == guard.lost == guard.asked == guard.promised == 0


def test_the_guard_wants_evidence_and_gives_up_when_the_account_is_empty() -> None:
    guard = Guard(1000)
    assert guard.by_age and guard.wanted == FEWEST == 1000
    assert Guard(100).wanted == 100 and Guard(5 * FEWEST).wanted == FEWEST
    assert Guard(100 * FEWEST).wanted == EVIDENCE * 100 * FEWEST
    book(guard, 0, 0, 10**6, int(guard.wanted))
    book(guard, 0, 0, 0, -10)
    assert guard.by_age
    book(guard, 0, 0, 0, 11)
    assert not guard.by_age and guard.turns == 1
    book(guard, 0, int(START * 1000), 0, 0)
    assert not guard.by_age
    book(guard, 0, 0, int(1000 / TOLERATED), 0)
    assert guard.balance == MOST * 1000
    book(guard, 0, int(MOST * 1000) + 1, 0, 10**6)
    assert guard.by_age and guard.turns == 1
    book(guard, 10**6, 0, 0, int(guard.wanted))
    assert guard.by_age, "what was promised before counts no more"


def trusting(blocks: int, with_windows: bool = False) -> Guard:
    guard = Guard(blocks)
    guard.with_windows = with_windows
    book(guard, 0, 0, 0, int(guard.wanted) + 1)
    assert not guard.by_age
    return guard


def test_a_stake_is_what_was_won_and_a_share_of_what_was_asked_for() -> None:
    guard = trusting(10_000)
    assert guard.stake == 0
    for _ in range(100):
        book(guard, 0, 0, 400, 50)
    assert guard.stake == LENT * 40_000, "a promise is no winning"
    book(guard, 300, 0, 0, 0)
    assert guard.stake == LENT * 40_000 + 300
    book(guard, 0, 200, 0, 0)
    assert guard.stake == LENT * 40_000 + 100
    book(guard, 0, 9_000, 0, 0)
    assert guard.stake == 0 and guard.by_age
    book(guard, 5_000, 0, 0, int(guard.wanted) + 1)
    assert not guard.by_age and guard.stake == 0, "nothing is won in age's order, and what was lost is owed"


def test_with_windows_less_is_lent_and_nothing_that_would_keep_no_prompt() -> None:
    for blocks in (SMALL // 10, SMALL, 10 * SMALL):
        plain, guard = trusting(blocks), trusting(blocks, with_windows=True)
        for _ in range(TRUSTED_AFTER_WITH_WINDOWS // 2):
            book(guard, 0, 0, blocks, 0)
            book(plain, 0, 0, blocks, 0)
            assert guard.stake < plain.stake
            assert guard.stake == 0 or guard.stake >= LEAST * blocks
        assert guard.stake == (pytest.approx(blocks / 8) if blocks >= SMALL else 0), (
            "a small pool's history is short"
        )


def test_with_windows_what_a_lost_block_made_useless_is_lost_with_it() -> None:
    for with_windows, lost in ((True, 1 + 20 + 7), (False, 1 + 7)):
        guard = trusting(1000, with_windows)
        for _ in range(20):
            guard.computed_again(anyway=False)
        guard.computed_again(anyway=True)
        guard.lost_or_not(kept_by_age=True)
        for _ in range(7):
            guard.computed_again(anyway=False)
        assert guard.lost == lost
        guard.new_or_hit()
        guard.computed_again(anyway=False)
        guard.lost_or_not(kept_by_age=False)
        guard.lost_or_not(kept_by_age=True)
        assert guard.lost == lost + 1, "age would have lost the one before"


@pytest.mark.parametrize(
    ("with_windows", "after"), [(False, TRUSTED_AFTER), (True, TRUSTED_AFTER_WITH_WINDOWS)]
)
def test_after_a_long_history_the_stake_is_the_whole_pool(with_windows: bool, after: int) -> None:
    guard = trusting(SMALL, with_windows)
    shares = []
    for _ in range(after):
        book(guard, 0, 0, SMALL, 0)
        shares.append(guard.stake / SMALL)
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert all(share / pools < 0.015 for pools, share in enumerate(shares, 1)), "of all blocks asked for"


@given(
    st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1), st.integers(0, 1000)), min_size=1, max_size=300)
)
def test_what_a_stake_loses_was_won_before_or_is_a_share_of_what_was_asked(
    epochs: list[tuple[int, float, int]],
) -> None:
    """Where an epoch loses at most its stake, and new evidence always comes."""
    guard = trusting(1000)
    lost_in_all = 0
    for won, share, asked in epochs:
        if guard.by_age:
            book(guard, 0, 0, asked, int(guard.wanted) + 1)
        lost = int(share * guard.stake)
        lost_in_all += lost - won
        book(guard, won, lost, asked, 0)
        assert lost_in_all <= max(LENT, 1 / TRUSTED_AFTER) * guard.history


@pytest.mark.parametrize("stake", [60.0, 100.0])
def test_blocks_used_once_go_before_their_turn_as_far_as_the_stake_reaches(stake: float) -> None:
    pool = Pool(1000)
    policy = pool.policy
    policy.guard = trusting(1000)
    policy.guard.stake = stake
    policy.guard.settle = lambda: None  # type: ignore[method-assign]
    most = 0
    for at in range(12_000):  # 400 prompts come back after 1,200 blocks each, which is more than age keeps
        pool.ask(10**6 + at if at % 3 else at // 3 % 400)
        most = max(most, policy.staked)
    assert 0.9 * stake <= most <= stake
