"""Hashes that were evicted: exactly the last ones that were not taken back, in bounded arrays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.policies.remembered import Remembered

HASHES = st.lists(st.integers(0, 12).map(lambda n: b"%d" % n), max_size=12)
CALLS = st.lists(st.tuples(st.booleans(), HASHES), max_size=20)


@given(st.integers(0, 9), CALLS)
def test_it_remembers_the_last_ones_and_no_others(size: int, calls: list[tuple[bool, list[bytes]]]) -> None:
    """Few hashes in few buckets: chains are long, and a hash is often added again while it is remembered."""
    remembered, last, taken = Remembered(size), list[bytes](), set[int]()
    added = 0
    for adds, hashes in calls:
        if adds:
            remembered.add_all(hashes)
            last, added = [*last, *hashes], added + len(hashes)
            continue
        expected = set()
        for one in hashes:
            newest = max((at for at, key in enumerate(last) if key == one and at >= added - size), default=-1)
            if newest >= 0 and newest not in taken:
                expected.add(one)
                taken.add(newest)
        assert remembered.take_all(hashes) == expected


def test_long_use_takes_no_more_room() -> None:
    remembered = Remembered(64)
    room = [len(each) for each in (remembered.marks, remembered.first, remembered.older, remembered.taken)]
    keys = [b"%d" % (7919 * number) for number in range(10_000)]
    remembered.add_all(keys)
    assert room == [
        len(each) for each in (remembered.marks, remembered.first, remembered.older, remembered.taken)
    ]
    assert remembered.take_all(keys) == set(keys[-64:])
