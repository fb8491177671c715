"""Two classes, single-use and reused blocks, evicted by age with a bonus for the reused. O(1) per block.

A block is reused when it is hit, or when it is stored and its hash is resident or in the ghost list. The ghost holds
the hashes of the last evictions, `ghost_factor` pool sizes of them, without a gap: one missing hash would leave a
single-use block in the middle of a prefix that came back; it would be evicted first, and the rest of the prefix could
not be hit any more.
The next block is the older one of the two queues' heads, but a reused block only if it is older by more than
`reuse_bonus_s` seconds: 0 is LRU, infinity (1e9) evicts single-use blocks as long as there are any. With a bonus, the
heads are compared once for up to RUN blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtune.core import state
from kvtune.core.policies import SPECULATIVE, Shelves
from kvtune.core.policies.lru import InOrder
from kvtune.core.settings import CoreSettings

SINGLE, REUSED = 2, 3
RUN = 16
_MASK = (1 << 62) - 1


def _mark(key: bytes) -> int:
    """A well-spread number for a hash, also for hashes that are not random (tests, traces)."""
    return (int.from_bytes(key[-12:], "little") * 0x9E3779B97F4A7C15F39CC0605CEDC835 >> 66) & _MASK


class Ghost:
    """The last `size` hashes that were added. A hash table in arrays, whose chains run through the slots of a ring."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.added = 0
        self.marks = array("q", bytes(8 * size))
        self.first = array("i", bytes(4 * size))  # of each bucket: the slot of its newest mark, plus one
        self.older = array("i", bytes(4 * size))  # of each slot: the next one of its bucket, plus one

    def __contains__(self, mark: int) -> bool:
        marks, older = self.marks, self.older
        slot = self.first[mark % self.size] if self.size else 0
        while slot:
            if marks[slot - 1] == mark:
                return True
            slot = older[slot - 1]
        return False

    def add(self, mark: int) -> None:
        if not self.size:
            return
        at = self.added % self.size
        if self.added >= self.size:
            self._forget(at + 1)
        self.added += 1
        bucket = mark % self.size
        self.marks[at] = mark
        self.older[at] = self.first[bucket]
        self.first[bucket] = at + 1

    def _forget(self, oldest: int) -> None:
        """The oldest of all is the last of its chain."""
        first, older = self.first, self.older
        bucket = self.marks[oldest - 1] % self.size
        slot = first[bucket]
        if slot == oldest:
            first[bucket] = 0
            return
        while older[slot - 1] != oldest:
            slot = older[slot - 1]
        older[slot - 1] = 0


class TwoClass(InOrder):
    name = "two_class"
    tiers = ("speculative", "single", "reused")

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        super().__init__(shelves, settings)
        self.bonus_s = settings.reuse_bonus_s if settings.reuse else 0.0
        self.reused = bytearray(shelves.num_blocks)
        self.last_used_s = array("d", bytes(8 * shelves.num_blocks))
        self.order = array("q", bytes(8 * shelves.num_blocks))
        self.placed = 0
        self.mark_of = array("q", bytes(8 * shelves.num_blocks))
        self.ghost = Ghost(int(settings.ghost_factor * shelves.num_blocks))
        self.ghost_hits = 0

    def place(self, block_ids: Sequence[int]) -> list[int]:
        now_s = state.clock()
        for block_id in block_ids:
            self.last_used_s[block_id] = now_s
            self.placed += 1
            self.order[block_id] = self.placed
        grade_of, reused = self.shelves.grade_of, self.reused
        return [
            REUSED if reused[block_id] else 1 if grade_of[block_id] == SPECULATIVE else SINGLE
            for block_id in block_ids
        ]

    def choose(self, wanted: int) -> tuple[int, int]:
        shelves = self.shelves
        if shelves.size(1):
            return 1, min(wanted, shelves.size(1))
        single, reused = shelves.head(SINGLE), shelves.head(REUSED)
        if reused < 0:
            return SINGLE, min(wanted, shelves.size(SINGLE))
        if single < 0:
            return REUSED, min(wanted, shelves.size(REUSED))
        ahead_s = self.last_used_s[single] - self.last_used_s[reused]
        if ahead_s == self.bonus_s == 0.0:
            return (REUSED if self.order[reused] < self.order[single] else SINGLE), 1
        tier = REUSED if ahead_s > self.bonus_s else SINGLE
        # A request's blocks are next to each other and of the same age.
        return tier, min(wanted, shelves.size(tier), RUN) if self.bonus_s else 1

    def hit(self, block_ids: Sequence[int]) -> None:
        reused = self.reused
        for block_id in block_ids:
            reused[block_id] = 1

    def retired(self, block_ids: Sequence[int]) -> None:
        super().retired(block_ids)
        for block_id in block_ids:
            self.reused[block_id] = 0

    def stored(self, block_ids: Sequence[int], keys: Sequence[bytes], resident: bool, anyway: bool) -> None:
        for block_id, key in zip(block_ids, keys, strict=True):
            mark = self.mark_of[block_id] = _mark(key)
            if resident:
                self.reused[block_id] = 1
            elif mark in self.ghost:
                self.reused[block_id] = 1
                self.ghost_hits += 1

    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        for block_id, key in zip(block_ids, keys, strict=True):
            self.reused[block_id] = 0
            self.ghost.add(self.mark_of[block_id] or _mark(key))

    def reset(self) -> None:
        self.reused = bytearray(len(self.reused))
        self.ghost = Ghost(self.ghost.size)

    def counters(self) -> dict[str, int]:
        return {"ghost_hits": self.ghost_hits}
