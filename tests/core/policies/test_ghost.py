"""The ghost of the two-class policy: exactly the last hashes that were evicted, in bounded arrays."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.policies.two_class import Ghost

MARKS = st.lists(st.integers(0, 30), max_size=200)


@given(st.integers(1, 12), MARKS)
def test_it_remembers_the_last_ones_and_no_others(size: int, marks: list[int]) -> None:
    """Few marks in few buckets: chains are long, and a mark is often added again while it is remembered."""
    ghost, last = Ghost(size), deque[int](maxlen=size)
    for mark in marks:
        ghost.add(mark)
        last.append(mark)
        assert {m for m in range(31) if m in ghost} == set(last)


@pytest.mark.parametrize("mark", [0, 1, (1 << 62) - 1])
def test_none_are_remembered_without_room(mark: int) -> None:
    ghost = Ghost(0)
    ghost.add(mark)
    assert mark not in ghost


def test_long_use_takes_no_more_room() -> None:
    ghost = Ghost(64)
    room = len(ghost.marks), len(ghost.first), len(ghost.older)
    for mark in range(10_000):
        ghost.add(mark * 7919)
    assert (len(ghost.marks), len(ghost.first), len(ghost.older)) == room
    assert all(mark * 7919 in ghost for mark in range(10_000 - 64, 10_000))
    assert not any(mark * 7919 in ghost for mark in range(10_000 - 64))
