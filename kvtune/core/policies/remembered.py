"""Remembers the hashes evicted last: 32 bits of each, and whether it came back.

11 bytes per hash, in arrays: a ring buffer, and a hash table whose chains link slots of the ring.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from zlib import crc32


class Remembered:
    """The last `size` hashes that were added, without those taken since."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.added = 0
        self.buckets = max(1, size // 2)
        self.marks = array("I", [0]) * size
        # Of each slot: the next older slot of its bucket, plus one (0: none).
        self.older = array("I", [0]) * size
        self.first = array("I", [0]) * self.buckets  # of each bucket: its newest slot, plus one (0: none)
        self.taken = bytearray(size)  # of each slot: 1 for a hash that came back

    def add_all(self, keys: Iterable[bytes]) -> None:
        """Remember these hashes in this order."""
        size, buckets, first, older = self.size, self.buckets, self.first, self.older
        if not size:
            return
        for mark in map(crc32, keys):
            at = self.added % size
            if self.added >= size:
                self._drop(at)
            self.added += 1
            bucket = mark % buckets
            self.marks[at] = mark
            self.taken[at] = 0
            older[at] = first[bucket]
            first[bucket] = at + 1

    def take_all(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of `keys` that are remembered, and forget them."""
        found: set[bytes] = set()
        if not self.size:
            return found
        marks, older, first, taken = self.marks, self.older, self.first, self.taken
        for key in keys:
            mark = crc32(key)  # well spread, even where hashes are not random (tests, traces)
            slot = first[mark % self.buckets]
            while slot and marks[slot - 1] != mark:
                slot = older[slot - 1]
            if slot and not taken[slot - 1]:
                found.add(key)
                taken[slot - 1] = 1
        return found

    def _drop(self, at: int) -> None:
        """Forget the hash in slot `at`: the oldest of all, so the last of its chain."""
        first, older = self.first, self.older
        bucket = self.marks[at] % self.buckets
        oldest = at + 1
        slot = first[bucket]
        if slot == oldest:
            first[bucket] = 0
            return
        while older[slot - 1] != oldest:
            slot = older[slot - 1]
        older[slot - 1] = 0
