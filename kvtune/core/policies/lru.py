"""Least recently used, exactly as stock: one queue, oldest first. A failed policy is replaced by `InOrder`."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.core.policies import FAR, Shelves
from kvtune.core.settings import CoreSettings


class InOrder:
    """The base of policies: gives out blocks of the first tier that has any, and places all blocks in the last."""

    name = "in_order"
    tiers: tuple[str, ...] = ("aged",)
    replaces = False

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        self.shelves = shelves

    def place(self, block_ids: Sequence[int]) -> list[int]:
        return [len(self.tiers)] * len(block_ids)

    def choose(self, wanted: int) -> tuple[int, int]:
        size = self.shelves.size
        for tier in range(1, len(self.tiers) + 1):
            available = size(tier)
            if available:
                return tier, min(wanted, available)
        raise LookupError("every tier is empty")

    def hit(self, block_ids: Sequence[int]) -> None:
        pass

    def resumed(self, blocks: int, kept: int, grade: int) -> None:
        pass

    def retired(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.shelves.grade_of[block_id] = FAR

    def needed(self, block_ids: Sequence[int]) -> None:
        pass

    def expected(self, block_ids: Sequence[int]) -> None:
        self.hit(block_ids)

    def replaced(self, block_id: int, anyway: bool) -> None:
        pass

    def stored(self, block_ids: Sequence[int], keys: Sequence[bytes], resident: bool, anyway: bool) -> None:
        pass

    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        pass

    def reset(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}


class Lru(InOrder):
    """One tier, oldest first."""

    name = "lru"
