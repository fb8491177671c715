"""Blocks that were evicted: the last ones, every one, by 32 bits of their hash, with their class and epoch.

Arrays only, 13 bytes a block: a ring, and a hash table whose chains are slots of the ring.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from zlib import crc32

TAKEN = 255
"""The class of a block that came back."""


mark = crc32
"""32 bits of a hash, the same in every process, well spread even where hashes are not random (tests, traces)."""


def mark_of_output(key: bytes) -> int:
    """The mark of a window where an output ended, the same for each group: keys end with their group."""
    return mark(key[:-4])


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
        self.add_all((mark,), (kind,), (epoch,))

    def add_all(self, marks: Iterable[int], kinds: Iterable[int], epochs: Iterable[int]) -> None:
        """Blocks in this order; classes and epochs may be endless."""
        size, buckets, added = self.size, self.buckets, self.added
        all_marks, all_kinds, all_epochs = self.marks, self.kinds, self.epochs
        older, first = self.older, self.first
        for mark, kind, epoch in zip(marks, kinds, epochs, strict=False):
            if not size:
                self.forget(kind, epoch)
                continue
            at = added % size
            if added >= size:
                self._drop(at)
            added += 1
            bucket = mark % buckets
            all_marks[at] = mark
            all_epochs[at] = epoch & 0xFFFF
            all_kinds[at] = kind
            older[at] = first[bucket]
            first[bucket] = at + 1
        self.added = added

    def take_all(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """`take` for each of these hashes: the classes of those that were remembered."""
        hashes = list(keys)
        found = self.take_each(map(mark, hashes))
        return {key: known[0] for key, known in zip(hashes, found, strict=True) if known is not None}

    def take(self, mark: int) -> tuple[int, int] | None:
        """(class, 16 bits of the epoch) of the newest block with this mark, which is remembered no more."""
        return self.take_each((mark,))[0]

    def take_each(self, wanted: Iterable[int]) -> list[tuple[int, int] | None]:
        """`take` for each of these marks."""
        marks, older, first, kinds, buckets = self.marks, self.older, self.first, self.kinds, self.buckets
        taken: list[tuple[int, int] | None] = []
        for mark in wanted:
            slot, found = first[mark % buckets] if self.size else 0, None
            while slot:
                at = slot - 1
                if marks[at] == mark:
                    if kinds[at] != TAKEN:
                        found = kinds[at], self.epochs[at]
                        kinds[at] = TAKEN
                    break
                slot = older[at]
            taken.append(found)
        return taken

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
