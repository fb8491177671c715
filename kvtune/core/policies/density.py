"""The default: by age, but what was used once may go before older blocks that came back, while that pays. O(1) a block.

    tier         holds                                                   given out
    speculative  windows at doubling distances, never hit                first, oldest first
    far          slack for suffixes of unknown length, never hit         then
    near         slack close to a prompt's end, while hits use it not    then
    single       ordinary blocks, used once                              the older head; the single one, too, where
    reused       those that were hit, or came back after their eviction  the reused one is worth more (ages.py)

A reused block never goes before an older single one: what follows it in its prefix is always older. `guard.py`
turns the policy back to age alone when that would have hit more. It starts so, too: before the first hits
nothing is worth more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtune.core.policies import FAR, NEAR, SPECULATIVE, TERMINAL, Shelves
from kvtune.core.policies.ages import HALVED_AFTER, Ages
from kvtune.core.policies.guard import Guard
from kvtune.core.policies.lru import InOrder
from kvtune.core.policies.remembered import Remembered, mark
from kvtune.core.settings import CoreSettings

NEAR_TIER, SINGLE, REUSED = 3, 4, 5
_FIRST = {SPECULATIVE: 1, FAR: 2, NEAR: NEAR_TIER}
ONCE, AGAIN, HIT = range(3)
"""Of a block: used once; came back after its eviction; hit since it was stored."""
WORTH = 2.0
"""What a reused block's value counts, of which more depends than of its own hits."""
REMEMBERED = 1.9
"""Evicted blocks that are remembered, in pool sizes: 25 bytes a block of the pool. 13 more are kept of each block."""
RUN = 16
"""Blocks that one comparison of values may decide: those of one request stand together and are of one age."""
EXPLORED = 16
"""In one epoch of so many near blocks are ordinary, to learn whether hits use them."""
NEAR_SHARE = 4
"""Near blocks are ordinary while one in so many hits that go on where an output ended uses one."""


class Density(InOrder):
    name = "density"
    tiers = ("speculative", "far", "near", "single", "reused")
    replaces = True

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        super().__init__(shelves, settings)
        self.reuse = settings.reuse
        self.reset()

    def reset(self) -> None:
        blocks = self.shelves.num_blocks
        self.use = bytearray(blocks)
        self.freed_at = array("Q", [0]) * blocks  # in blocks freed; 0: in use, or in a tier that goes first
        self.mark_of = array("I", [0]) * blocks
        self.ages = Ages(blocks)
        self.guard = Guard(blocks)
        self.remembered = Remembered(int(REMEMBERED * blocks), self.ages.went)
        self.freed = self.ages.length
        self.epoch_ends = self.freed + self.ages.length
        self.reach: float | None = (
            0.0  # epochs since then are held by a pool that evicts by age; None: look again
        )
        self.won = self.lost = self.asked = self.promised = 0
        self.single_since = self.reused_since = 0
        self.losing = False
        self.near_hits = self.terminal_hits = self.ghost_hits = 0

    def place(self, block_id: int, grade: int) -> int:
        use = self.use[block_id]
        if grade and use != HIT:
            tier = _FIRST.get(grade, 0)
            if tier and (tier != NEAR_TIER or self._near_first()):
                return tier
        self.freed = freed = self.freed + 1
        if freed >= self.epoch_ends:
            self._end_epoch()
        self.freed_at[block_id] = freed
        kind = 1 if use else 0
        self.ages.came(kind)
        return SINGLE + kind

    def _near_first(self) -> bool:
        of_use = self.near_hits and self.near_hits * NEAR_SHARE > self.terminal_hits
        return not of_use and self.ages.epoch % EXPLORED != 0

    def _end_epoch(self) -> None:
        self.epoch_ends += self.ages.length
        self.ages.tick()
        self.guard.settle(self.won, self.lost, self.asked, self.promised)
        self.won = self.lost = self.asked = self.promised = 0
        self.reach = None
        if self.ages.epoch % HALVED_AFTER == 0:
            self.near_hits //= 2
            self.terminal_hits //= 2

    def _look(self, free: int) -> None:
        """How far back a pool with so many free blocks would reach by age, and one that prefers reused blocks."""
        self.reach = self.ages.reach(free)
        self.single_since, self.reused_since = self.ages.traded(self.reach)

    def choose(self, wanted: int) -> tuple[int, int]:
        shelves = self.shelves
        size = shelves.size
        for tier in (1, 2, NEAR_TIER):
            here = size(tier)
            if here:
                return tier, min(wanted, here)
        if self.reach is None:
            self._look(shelves.num_free_blocks)
        single, reused = shelves.head(SINGLE), shelves.head(REUSED)
        if reused < 0:
            return SINGLE, min(wanted, size(SINGLE))
        if single < 0:
            return REUSED, min(wanted, size(REUSED))
        once, again = self.freed_at[single], self.freed_at[reused]
        if once < again:
            return SINGLE, 1
        if self.reuse and not self.guard.by_age:
            value, length = self.ages.value, self.ages.length
            if value(0, once // length) < WORTH * value(1, again // length):
                return SINGLE, min(wanted, size(SINGLE), RUN)
        return REUSED, 1

    def hit(self, block_ids: Sequence[int]) -> None:
        use, freed_at, ages = self.use, self.freed_at, self.ages
        length = ages.length
        if self.reach is None:
            touched = sum(1 for block_id in block_ids if freed_at[block_id])
            self._look(self.shelves.num_free_blocks + touched)
        assert self.reach is not None
        single_since = self.single_since * length
        held_since = self.reach * length
        grade_of = self.shelves.grade_of
        beyond = near = False
        block_id = 0
        for block_id in block_ids:
            freed = freed_at[block_id]
            if freed:
                kind = 1 if use[block_id] else 0
                ages.hit(kind, freed // length)
                if not kind and held_since <= freed < single_since:
                    self.promised -= 1
                freed_at[block_id] = 0
                # Blocks that follow one which age had evicted would have been of no use.
                beyond = beyond or freed < held_since
                self.won += beyond
            near = near or grade_of[block_id] == NEAR
            use[block_id] = HIT
        self.asked += len(block_ids)
        self.losing = False
        self.near_hits += near
        self.terminal_hits += grade_of[block_id] == TERMINAL

    def retired(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.use[block_id] = ONCE

    def stored(self, block_id: int, key: bytes, resident: bool) -> None:
        number = self.mark_of[block_id] = mark(key)
        self.asked += 1
        if resident:
            self.use[block_id] = HIT
            return
        found = self.remembered.take(number)
        if found is None:
            self.losing = False
            return
        kind, epoch = found
        ages = self.ages
        ages.hit(kind, epoch)
        self.use[block_id] = AGAIN
        self.ghost_hits += 1
        epoch = ages.epoch - ((ages.epoch - epoch) & 0xFFFF)
        if self._kept_by_age(epoch + 0.5):
            self.lost += 1
            self.losing = True
        elif kind and epoch >= self.reused_since:
            self.promised += 1

    def replaced(self, block_id: int) -> None:
        freed = self.freed_at[block_id]
        if freed:
            epoch = freed / self.ages.length
            self.ages.hit(1 if self.use[block_id] else 0, int(epoch))
            self.freed_at[block_id] = 0
            # It was there, but of no use, because one before it was evicted that age would have kept.
            if self.losing and self._kept_by_age(epoch):
                self.lost += 1
        self.use[block_id] = ONCE

    def _kept_by_age(self, epoch: float) -> bool:
        return self.reach is not None and epoch >= self.reach

    def evicted(self, block_id: int, key: bytes) -> None:
        freed = self.freed_at[block_id]
        if freed:
            kind = 1 if self.use[block_id] else 0
            self.remembered.add(self.mark_of[block_id], kind, freed // self.ages.length)
            self.freed_at[block_id] = 0
        self.use[block_id] = ONCE

    def counters(self) -> dict[str, int]:
        return {"ghost_hits": self.ghost_hits, "turns_to_age_and_back": self.guard.turns}
