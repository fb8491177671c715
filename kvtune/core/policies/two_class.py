"""Two classes and a ghost list: blocks used once against blocks that came back, by age with a bonus. O(1) a block.

A block is "reused" when its hash was resident or remembered in the ghost when it was stored, or when it is hit. The
ghost remembers hashes of evicted blocks for `ghost_factor` pool sizes of evictions, in arrays: a hash is written
over the oldest of the four slots that it maps to, with the number of the eviction.
The next block is the older head, a reused one only if it is older by more than `reuse_bonus_s` seconds:
0 is LRU, infinity (1e9) evicts single-use blocks as long as there are any. With a bonus, heads are compared once for up
to RUN blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvtune.core import state
from kvtune.core.policies import SPECULATIVE, Shelves
from kvtune.core.policies.lru import InOrder
from kvtune.core.settings import CoreSettings

SINGLE, REUSED = 2, 3
WAYS = 4
RUN = 16
_MASK = (1 << 62) - 1


def _mark(key: bytes) -> int:
    """A number for a hash that spreads well even where hashes are not random (tests, traces)."""
    return (int.from_bytes(key[-12:], "little") * 0x9E3779B97F4A7C15F39CC0605CEDC835 >> 66) & _MASK


class TwoClass(InOrder):
    name = "two_class"
    tiers = ("speculative", "single", "reused")

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        super().__init__(shelves, settings)
        self.bonus_s = settings.reuse_bonus_s if settings.reuse else 0.0
        self.horizon = int(settings.ghost_factor * shelves.num_blocks)
        self.reused = bytearray(shelves.num_blocks)
        self.last_used_s = array("d", bytes(8 * shelves.num_blocks))
        self.order = array("q", bytes(8 * shelves.num_blocks))
        self.placed = 0
        self.mark_of = array("q", bytes(8 * shelves.num_blocks))
        self.sets = max(1, -(-2 * self.horizon // WAYS))
        self.ghost = array("q", bytes(8 * WAYS * self.sets))
        self.written = array("q", bytes(8 * WAYS * self.sets))
        self.oldest = bytearray(self.sets)
        self.evictions = 0
        self.ghost_hits = 0

    def place(self, block_id: int, grade: int) -> int:
        self.last_used_s[block_id] = state.clock()
        self.placed += 1
        self.order[block_id] = self.placed
        if self.reused[block_id]:
            return REUSED
        return 1 if grade == SPECULATIVE else SINGLE

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
        # Blocks of one request stand together and are of one age.
        return tier, min(wanted, shelves.size(tier), RUN) if self.bonus_s else 1

    def hit(self, block_ids: Iterable[int]) -> None:
        reused = self.reused
        for block_id in block_ids:
            reused[block_id] = 1

    def retired(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.reused[block_id] = 0

    def stored(self, block_id: int, key: bytes, resident: bool) -> None:
        mark = self.mark_of[block_id] = _mark(key)
        if resident:
            self.reused[block_id] = 1
        elif self.horizon:
            first = mark % self.sets * WAYS
            ways = self.ghost[first : first + WAYS]
            if mark in ways and self.evictions - self.written[first + ways.index(mark)] <= self.horizon:
                self.reused[block_id] = 1
                self.ghost_hits += 1

    def evicted(self, block_id: int, key: bytes) -> None:
        self.reused[block_id] = 0
        self.evictions += 1
        if self.horizon:
            mark = self.mark_of[block_id] or _mark(key)
            place = mark % self.sets
            way = self.oldest[place]
            self.oldest[place] = (way + 1) % WAYS
            self.ghost[place * WAYS + way] = mark
            self.written[place * WAYS + way] = self.evictions

    def reset(self) -> None:
        self.reused = bytearray(len(self.reused))
        self.ghost = array("q", bytes(8 * WAYS * self.sets))
