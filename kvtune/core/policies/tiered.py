"""Tiers by what a block is kept for: speculative windows are evicted first, blocks that were hit last.

    tier         holds                                                given out
    speculative  windows at doubling distances, never hit             first, oldest first
    far, near    windows kept for suffixes of unknown length          then far, then near
    probation    never hit, or hit long ago                           then
    protected    hit since stored; at most `protected_share` of all   last

A protected block beyond the share is demoted to the young end of probation, and is protected again if it is hit.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.core.policies import FAR, NEAR, SPECULATIVE, Shelves
from kvtune.core.policies.lru import InOrder
from kvtune.core.settings import CoreSettings

PROBATION, PROTECTED = 4, 5
_TIER = {SPECULATIVE: 1, FAR: 2, NEAR: 3}


class Tiered(InOrder):
    name = "tiered"
    tiers = ("speculative", "far", "near", "probation", "protected")

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        super().__init__(shelves, settings)
        self.reuse = settings.reuse
        self.protected_most = int(settings.protected_share * shelves.num_blocks)
        self.was_hit = bytearray(shelves.num_blocks)

    def place(self, block_ids: Sequence[int]) -> list[int]:
        grade_of, was_hit = self.shelves.grade_of, self.was_hit
        return [
            PROTECTED if self.reuse and was_hit[block_id] else _TIER.get(grade_of[block_id], PROBATION)
            for block_id in block_ids
        ]

    def choose(self, wanted: int) -> tuple[int, int]:
        shelves = self.shelves
        while shelves.size(PROTECTED) > self.protected_most:
            self.was_hit[shelves.head(PROTECTED)] = 0
            shelves.demote(PROTECTED, PROBATION)
        return super().choose(wanted)

    def hit(self, block_ids: Sequence[int]) -> None:
        was_hit = self.was_hit
        for block_id in block_ids:
            was_hit[block_id] = 1

    def retired(self, block_ids: Sequence[int]) -> None:
        super().retired(block_ids)
        for block_id in block_ids:
            self.was_hit[block_id] = 0

    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        for block_id in block_ids:
            self.was_hit[block_id] = 0

    def reset(self) -> None:
        self.was_hit = bytearray(len(self.was_hit))
