"""Lists are shrunk to what their failure needs, within a budget of replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.tools.soak.shrink import shrink

MANY = 10_000


class Counted:
    """A failure, the number of times it was asked for, and the last list that failed."""

    def __init__(self, fails: Callable[[Sequence[int]], bool]) -> None:
        self._fails = fails
        self.calls = 0
        self.failed: list[int] = []

    def __call__(self, items: Sequence[int]) -> bool:
        self.calls += 1
        if self._fails(items):
            self.failed = list(items)
            return True
        return False


def needs(*wanted: int) -> Callable[[Sequence[int]], bool]:
    return lambda items: set(wanted) <= set(items)


@given(st.integers(1, 200), st.data())
def test_what_the_failure_needs_is_left_and_nothing_else(length: int, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.integers(0, length - 1), max_size=6))
    assert shrink(range(length), needs(*wanted), MANY) == sorted(wanted)


@given(st.lists(st.integers(0, 5), max_size=40), st.sets(st.integers(0, 5)), st.integers(0, 60))
def test_the_budget_is_kept_and_the_result_failed(items: list[int], wanted: set[int], budget: int) -> None:
    fails = Counted(needs(*(wanted & set(items))))
    kept = shrink(items, fails, budget)
    assert fails.calls <= budget
    assert kept == (fails.failed if fails.failed or len(kept) < len(items) else items)


def test_order_and_repeats_are_kept() -> None:
    fails = needs(3, 1)
    assert shrink([3, 2, 2, 1, 2], fails, MANY) == [3, 1]
    twice = shrink([5, 0, 5, 0, 5], lambda kept: list(kept).count(5) >= 2, MANY)
    assert twice == [5, 5]
