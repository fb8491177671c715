"""The default: by age, but what was used once may go before older blocks that came back, while that pays. O(1) a block.

    tier         holds                                                   given out
    speculative  windows at doubling distances, never hit                first, oldest first
    far          slack for suffixes of unknown length, never hit         then
    near         slack close to a prompt's end, never hit                then, unless by age pays more (extras.py)
    output       windows at an output's end, never hit                   the same
    single       ordinary blocks, used once                              the older head; the single one, too, where
    reused       those that were hit, or came back after their eviction  the reused one is worth more (ages.py)

A reused block never goes before an older single one: what follows it in its prefix is always older. `guard.py`
turns the policy back to age alone when that would have hit more. It starts so, too: before the first hits
nothing is worth more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtune.core.policies import FAR, NEAR, OUTPUT, OUTPUT_END, SPECULATIVE, TERMINAL, WINDOW, Shelves, ages
from kvtune.core.policies.ages import HALVED_AFTER, Ages
from kvtune.core.policies.extras import Account
from kvtune.core.policies.guard import Guard
from kvtune.core.policies.lru import InOrder
from kvtune.core.policies.remembered import Remembered, mark
from kvtune.core.settings import CoreSettings

NEAR_TIER, OUTPUT_TIER, SINGLE, REUSED = 3, 4, 5, 6
_ORDINARY = (WINDOW, TERMINAL)
_FIRST = {SPECULATIVE: 1, FAR: 2}
_EXTRA = {NEAR: (NEAR_TIER, ages.NEAR), OUTPUT: (OUTPUT_TIER, ages.OUTPUT), OUTPUT_END: (OUTPUT_TIER, ages.OUTPUT)}
ONCE, AGAIN, HIT = range(3)
"""Of a block: used once; came back after its eviction; hit since it was stored."""
WORTH = 2.0
"""What a reused block's value counts, of which more depends than of its own hits."""
REMEMBERED = 1.8
"""Evicted blocks that are remembered, in pool sizes: 24 bytes a block of the pool. 14 more are kept of each block."""
RUN = 16
"""Blocks that one comparison of values may decide: those of one request stand together and are of one age."""
EXPLORED = 16
"""In one epoch of so many, windows of outputs that go first go by age, to learn whether next turns use them."""


class Density(InOrder):
    name = "density"
    tiers = ("speculative", "far", "near", "output", "single", "reused")
    replaces = True

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        super().__init__(shelves, settings)
        self.reuse = settings.reuse
        self.reset()

    def reset(self) -> None:
        blocks = self.shelves.num_blocks
        self.use = bytearray(blocks)
        self.kind = bytearray(blocks)
        self.freed_at = array("Q", [0]) * blocks  # in blocks freed; 0: in use, or speculative, or far
        self.mark_of = array("I", [0]) * blocks
        self.ages = Ages(blocks)
        self.guard = Guard(blocks)
        self.near, self.output = Account(blocks), Account(blocks)
        self.remembered = Remembered(int(REMEMBERED * blocks), self.ages.went)
        self.freed = self.ages.length
        self.epoch_ends = self.freed + self.ages.length
        self.stale = True
        """How far a pool reaches was not looked at in this epoch."""
        self.reach = self.other_near = self.other_output = 0.0
        self.won = self.lost = self.asked = self.promised = 0
        self.single_since = self.reused_since = 0
        self.losing = False
        self.useless = self.near_cost = self.output_cost = 0
        self.ghost_hits = 0

    def place(self, block_id: int, grade: int) -> int:
        self.freed = freed = self.freed + 1
        if freed >= self.epoch_ends:
            self._end_epoch()
        use = self.use[block_id]
        if use == HIT or grade in _ORDINARY:
            kind = 1 if use else 0
            tier = SINGLE + kind
        elif grade in _FIRST:
            self.freed -= 1
            return _FIRST[grade]
        else:
            tier, kind = _EXTRA[grade]
            if kind == ages.OUTPUT and not self.output.by_age and self.ages.epoch % EXPLORED == 0:
                tier = SINGLE
        self.freed_at[block_id] = freed
        self.kind[block_id] = kind
        self.ages.came(kind)
        return tier

    def _end_epoch(self) -> None:
        self.epoch_ends += self.ages.length
        self.ages.tick()
        self.guard.settle(self.won, self.lost, self.asked, self.promised)
        self.won = self.lost = self.asked = self.promised = 0
        self.stale = True

    def _look(self, free: int) -> None:
        """How far back a pool with so many free blocks would reach by age, and one that prefers reused blocks."""
        self.stale = False
        counted = [ages.SINGLE, ages.REUSED]
        if self.near.by_age:
            counted.append(ages.NEAR)
        if self.output.by_age:
            counted.append(ages.OUTPUT)
        reach = self.ages.reach
        self.reach = reach(free, counted)
        self.other_near = reach(free, set(counted) ^ {ages.NEAR})
        self.other_output = reach(free, set(counted) ^ {ages.OUTPUT})
        self.single_since, self.reused_since = self.ages.traded(self.reach)

    def choose(self, wanted: int) -> tuple[int, int]:
        shelves = self.shelves
        size = shelves.size
        for tier in (1, 2):
            here = size(tier)
            if here:
                return tier, min(wanted, here)
        oldest, extra = 0, 0
        for tier, account in ((NEAR_TIER, self.near), (OUTPUT_TIER, self.output)):
            head = shelves.head(tier)
            if head >= 0:
                if not account.by_age:
                    return tier, min(wanted, size(tier))
                freed = self.freed_at[head]
                if not extra or freed < oldest:
                    oldest, extra = freed, tier
        if self.stale:
            self._look(shelves.num_free_blocks)
        single, reused = shelves.head(SINGLE), shelves.head(REUSED)
        once = self.freed_at[single] if single >= 0 else 1 << 63
        again = self.freed_at[reused] if reused >= 0 else 1 << 63
        if extra and oldest < min(once, again):
            return extra, 1
        if reused < 0:
            return SINGLE, 1
        if single < 0:
            return REUSED, 1
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
        if self.stale:
            touched = sum(1 for block_id in block_ids if freed_at[block_id])
            self._look(self.shelves.num_free_blocks + touched)
        single_since = self.single_since * length
        held_since = self.reach * length
        near_since = 0 if self.near.by_age else self.other_near * length
        output_since = 0 if self.output.by_age else self.other_output * length
        beyond = beyond_near = beyond_output = False
        for block_id in block_ids:
            freed = freed_at[block_id]
            if freed:
                kind = self.kind[block_id]
                ages.hit(kind, freed // length)
                if not kind and held_since <= freed < single_since:
                    self.promised -= 1
                freed_at[block_id] = 0
                # Blocks that follow one which age had evicted would have been of no use.
                beyond = beyond or freed < held_since
                self.won += beyond
                if kind <= 1:
                    if beyond_near or freed < near_since:
                        beyond_near = True
                        self.near.add(-1)
                    if beyond_output or freed < output_since:
                        beyond_output = True
                        self.output.add(-1)
            use[block_id] = HIT
        self.asked += len(block_ids)
        self.losing = False

    def resumed(self, blocks: int, kept: int, grade: int) -> None:
        """A prompt resumed behind so many blocks in a window of this grade; `kept` of the window are an output's."""
        if grade == NEAR:
            self.near.add(blocks)
        elif grade == OUTPUT_END:
            self.output.add(kept if self.output.by_age else EXPLORED * kept)
        self.useless = 0

    def retired(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.use[block_id] = ONCE

    def stored(self, block_id: int, key: bytes, resident: bool) -> None:
        number = self.mark_of[block_id] = mark(key)
        self.asked += 1
        if resident:
            self.use[block_id] = HIT
            return
        known = self.remembered.take(number)
        if known is None:
            self.losing = False
            return
        kind, epoch = known
        ages = self.ages
        ages.hit(kind, epoch)
        epoch = ages.epoch - ((ages.epoch - epoch) & 0xFFFF)
        if kind > 1:
            if not self.near.by_age and epoch >= self.other_near:
                self.near.add(self.useless)
                self.useless = 0
            # Ordinary blocks alone would have been of no use.
            self.near_cost = self.output_cost = 0
            return
        self.use[block_id] = AGAIN
        self.ghost_hits += 1
        if epoch + 0.5 >= self.reach:
            self.lost += 1
            self.losing = True
        else:
            if kind and epoch >= self.reused_since:
                self.promised += 1
            if self.near.by_age and epoch >= self.other_near:
                self.near_cost += 1
            if self.output.by_age and epoch >= self.other_output:
                self.output_cost += 1
        if key[-4:] in self.shelves.window_groups:
            # Without the extra windows this prompt could have resumed.
            self.near.add(-self.near_cost)
            self.output.add(-self.output_cost)
            self.near_cost = self.output_cost = 0

    def replaced(self, block_id: int) -> None:
        freed = self.freed_at[block_id]
        if freed:
            epoch = freed / self.ages.length
            self.ages.hit(self.kind[block_id], int(epoch))
            self.freed_at[block_id] = 0
            # It was there, but of no use, because one before it was evicted that age would have kept.
            if self.losing and epoch >= self.reach:
                self.lost += 1
            if not self.near.by_age and epoch >= self.other_near:
                self.useless += 1
        self.use[block_id] = ONCE

    def evicted(self, block_id: int, key: bytes) -> None:
        freed = self.freed_at[block_id]
        if freed:
            kind = self.kind[block_id]
            if kind != ages.OUTPUT:  # which are stored but once
                self.remembered.add(self.mark_of[block_id], kind, freed // self.ages.length)
            self.freed_at[block_id] = 0
        self.use[block_id] = ONCE

    def counters(self) -> dict[str, int]:
        return {
            "ghost_hits": self.ghost_hits,
            "turns_to_age_and_back": self.guard.turns,
            "turns_of_near_windows": self.near.turns,
            "turns_of_output_windows": self.output.turns,
        }
