"""Blocks that were evicted: the last ones, every one, by 32 bits of their hash, with their class and epoch.

Arrays only, 13 bytes a block: a ring, and a hash table whose chains are slots of the ring.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from zlib import crc32

TAKEN = 255
"""The class of a block that came back."""


def mark(key: bytes) -> int:
    """32 bits of a hash, the same in every process, well spread even where hashes are not random (tests, traces)."""
    return crc32(key)


class Remembered:
    """The last `size` blocks that were added and not taken. `forget(kind, epoch)` is told of those that fall out."""

    def __init__(self, size: int, forget: Callable[[int, int], None]) -> None:
        self.size = size
        self.forget = forget
        self.added = 0
        self.buckets = max(1, size // 2)
        self.marks = array("I", [0]) * size
        self.older = array("I", [0]) * size  # of each slot: the next one of its bucket, plus one
        self.first = array("I", [0]) * self.buckets  # of each bucket: its newest slot, plus one
        self.epochs = array("H", [0]) * size
        self.kinds = bytearray(size)

    def add(self, mark: int, kind: int, epoch: int) -> None:
        if not self.size:
            self.forget(kind, epoch)
            return
        at = self.added % self.size
        if self.added >= self.size:
            self._drop(at)
        self.added += 1
        bucket = mark % self.buckets
        self.marks[at] = mark
        self.epochs[at] = epoch & 0xFFFF
        self.kinds[at] = kind
        self.older[at] = self.first[bucket]
        self.first[bucket] = at + 1

    def add_all(self, marks: Iterable[int], kind: int, epoch: int) -> None:
        """`add` for each of them, in this order."""
        size, buckets, epoch = self.size, self.buckets, epoch & 0xFFFF
        all_marks, older, first = self.marks, self.older, self.first
        for mark in marks if size else ():
            at = self.added % size
            if self.added >= size:
                self._drop(at)
            self.added += 1
            bucket = mark % buckets
            all_marks[at] = mark
            self.epochs[at] = epoch
            self.kinds[at] = kind
            older[at] = first[bucket]
            first[bucket] = at + 1
        for _ in marks if not size else ():
            self.forget(kind, epoch)

    def take_all(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """`take` for each of these hashes: the classes of those that were remembered."""
        taken: dict[bytes, int] = {}
        if not self.size:
            return taken
        marks, older, first, buckets, kinds = self.marks, self.older, self.first, self.buckets, self.kinds
        for key in keys:
            mark = crc32(key)
            slot = first[mark % buckets]
            while slot:
                at = slot - 1
                if marks[at] == mark:
                    if kinds[at] != TAKEN:
                        taken[key] = kinds[at]
                        kinds[at] = TAKEN
                    break
                slot = older[at]
        return taken

    def take(self, mark: int) -> tuple[int, int] | None:
        """(class, 16 bits of the epoch) of the newest block with this mark, which is remembered no more."""
        marks, older = self.marks, self.older
        slot = self.first[mark % self.buckets] if self.size else 0
        while slot:
            at = slot - 1
            if marks[at] == mark:
                kind = self.kinds[at]
                if kind == TAKEN:
                    return None
                self.kinds[at] = TAKEN
                return kind, self.epochs[at]
            slot = older[at]
        return None

    def _drop(self, at: int) -> None:
        """The oldest of all is the last of its chain."""
        first, older = self.first, self.older
        if self.kinds[at] != TAKEN:
            self.forget(self.kinds[at], self.epochs[at])
        bucket = self.marks[at] % self.buckets
        oldest = at + 1
        slot = first[bucket]
        if slot == oldest:
            first[bucket] = 0
            return
        while older[slot - 1] != oldest:
            slot = older[slot - 1]
        older[slot - 1] = 0
