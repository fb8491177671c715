"""Blocks that were evicted, by many at once: the same as one by one."""

from __future__ import annotations

from array import array
from itertools import repeat

from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.policies.remembered import Remembered, mark

HASHES = st.lists(st.integers(0, 12).map(lambda n: b"%d" % n), max_size=12)
CALLS = st.lists(st.tuples(st.booleans(), HASHES, st.integers(0, 2), st.integers(0, 1 << 17)), max_size=20)


@given(st.integers(0, 9), CALLS)
def test_many_at_once_are_one_by_one(size: int, calls: list[tuple[bool, list[bytes], int, int]]) -> None:
    forgotten: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    single, many = (Remembered(size, lambda kind, at, out=out: out.append((kind, at))) for out in forgotten)  # type: ignore[misc]
    for adds, hashes, kind, epoch in calls:
        if adds:
            for one in hashes:
                single.add(mark(one), kind, epoch)
            many.add_all(map(mark, hashes), repeat(kind), repeat(epoch))
        else:
            taken = {one: found[0] for one in hashes if (found := single.take(mark(one))) is not None}
            assert many.take_all(hashes) == taken
        for name in ("marks", "older", "first", "epochs", "kinds", "added"):
            assert getattr(single, name) == getattr(many, name), name
    assert isinstance(many.marks, array)
    if size:
        assert forgotten[0] == forgotten[1]
    else:
        assert len(forgotten[0]) == len(forgotten[1])
