"""Where the default policy places free blocks, and what it knows of them: `density.py` chooses among these."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvtune.core.policies import FAR, NEAR, OUTPUT, OUTPUT_END, WINDOW, Shelves, ages
from kvtune.core.policies.ages import Ages
from kvtune.core.policies.extras import Left, Near, Outputs
from kvtune.core.policies.guard import Guard
from kvtune.core.policies.lru import InOrder
from kvtune.core.policies.remembered import Remembered
from kvtune.core.settings import CoreSettings

SPECULATIVE_TIER, FAR_TIER, NEAR_TIER, OUTPUT_TIER, SINGLE, REUSED = range(1, 7)
ONCE, AGAIN, HIT, LEFT, NEEDED, LEFT_FREE = range(6)
"""Of a block: used once; came back after its eviction; hit since it was stored; hit in a window behind which a
conversation went on, and still in use; the same, and part of that prompt's own last window; LEFT and free."""
A_WINDOW_LEFT = 4
"""The class under which such a block is remembered if it went first. The others are those of ages.py."""
REMEMBERED = 1.8
"""Evicted blocks that are remembered, in pool sizes: 24 bytes a block of the pool. 13 more are kept of each block."""
MANY = 16
"""So many blocks or more are looked at as vectors: those of a prompt are mostly alike."""


class Placing(InOrder):
    """Half of `Density`: what is booked of each block, and the tier in which it waits."""

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        super().__init__(shelves, settings)
        self.reuse = settings.reuse
        self.reset()

    def reset(self) -> None:
        blocks = self.shelves.num_blocks
        self.use = bytearray(blocks)
        self.freed_at = array("q", [0]) * blocks
        """Four times the blocks freed until then, plus the class; 0: in use, or speculative, or far."""
        self._use, self._freed_at = np.frombuffer(self.use, np.uint8), np.frombuffer(self.freed_at, np.int64)
        self.mark_of = array("I", [0]) * blocks
        self.ages = Ages(blocks)
        self.guard = Guard(blocks)
        self.near, self.output = Near(blocks), Outputs(blocks)
        self.left = Left(blocks)
        self.remembered = Remembered(int(REMEMBERED * blocks), self._forgotten)
        self.an_epoch = 4 * self.ages.length
        self.freed = self.an_epoch
        self.epoch_ends = 2 * self.an_epoch - 4
        self.ahead: dict[int, int] = {}
        """Blocks used once that went before their turn, by epoch, as long as age would still have them."""
        self.staked = 0
        self.stale = True
        """How far a pool reaches was not looked at in this epoch."""
        self.reach = 0.0
        self.single_since = self.reused_since = 0
        self.beyond = False
        self.ghost_hits = 0

    def place(self, block_ids: Sequence[int]) -> list[int]:
        if len(block_ids) >= MANY:
            tier = self._place_alike(block_ids)
            if tier:
                return [tier] * len(block_ids)
        return [self._place(block_id) for block_id in block_ids]

    def _place(self, block_id: int) -> int:
        used, grade = self.use[block_id], self.shelves.grade_of[block_id]
        if used == NEEDED:
            # If the output's window has no room, the next turn resumes at the prompt's end.
            needed = self.left.turned and not self.output.has_room(self.shelves.size(OUTPUT_TIER))
            used = self.use[block_id] = HIT if needed else LEFT
        if used == LEFT:
            if grade != WINDOW:
                return FAR_TIER
            self.use[block_id] = LEFT_FREE
            if self.left.turned:
                return FAR_TIER
            tier = SINGLE
            kind = ages.SINGLE
        elif used == HIT or not grade:
            kind = 1 if used else 0
            tier = SINGLE + kind
        else:
            tier, kind = self._graded(grade)
            if tier <= FAR_TIER:
                return tier
        if self.freed >= self.epoch_ends:
            self._end_epoch()
        self.freed += 4
        self.freed_at[block_id] = self.freed + kind
        self.ages.came(kind, 1)
        return tier

    def _place_alike(self, block_ids: Sequence[int]) -> int:
        """The tier of all of these blocks, where they are of one class and not kept for a window; 0 otherwise."""
        blocks = np.array(block_ids)
        used = self._use[blocks]
        first = int(used[0])
        if first in (LEFT, NEEDED) or (used != first).any():
            return 0
        if first != HIT and np.frombuffer(self.shelves.grade_of, np.uint8)[blocks].any():
            return 0
        kind = ages.REUSED if first else ages.SINGLE
        while len(blocks):
            if self.freed >= self.epoch_ends:
                self._end_epoch()
            count = min(len(blocks), (self.epoch_ends - self.freed) // 4)
            end = self.freed + 4 * count
            self._freed_at[blocks[:count]] = np.arange(self.freed + 4 + kind, end + 4 + kind, 4)
            self.freed, blocks = end, blocks[count:]
            self.ages.came(kind, count)
        return REUSED if kind else SINGLE

    def _graded(self, grade: int) -> tuple[int, int]:
        """The tier and the class of a window's block that was never hit."""
        if grade == NEAR:
            return NEAR_TIER, ages.NEAR
        if grade in (OUTPUT, OUTPUT_END):
            return OUTPUT_TIER, ages.OUTPUT
        return (FAR_TIER if grade == FAR else SPECULATIVE_TIER), 0

    def _end_epoch(self) -> None:
        self.epoch_ends += self.an_epoch
        self.ages.tick()
        self.guard.with_windows = bool(self.shelves.window_groups)
        self.guard.settle()
        self.stale = True

    def _forgotten(self, kind: int, epoch: int) -> None:
        if kind != A_WINDOW_LEFT:
            self.ages.went(kind, epoch)
