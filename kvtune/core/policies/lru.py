"""Least recently used, exactly as stock: one queue, oldest first."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.core.policies import Shelves
from kvtune.knobs import CoreSettings


class InOrder:
    """Base of all policies: evicts from the first queue that is not empty, and places every block in the last queue."""

    name = "in_order"
    queues: tuple[str, ...] = ("aged",)
    extras_first = False

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        self.shelves = shelves

    def place(self, block_ids: Sequence[int]) -> list[int]:
        return [len(self.queues)] * len(block_ids)

    def choose(self, wanted: int) -> tuple[int, int]:
        size = self.shelves.size
        for queue in range(1, len(self.queues) + 1):
            available = size(queue)
            if available:
                return queue, min(wanted, available)
        raise LookupError("every queue is empty")

    def hit(self, block_ids: Sequence[int]) -> None:
        pass

    def left(self, block_ids: Sequence[int]) -> None:
        pass

    def stored(self, block_ids: Sequence[int], keys: Sequence[bytes], resident: bool) -> None:
        pass

    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        pass

    def reset(self) -> None:
        pass


class Lru(InOrder):
    """One queue, oldest first."""

    name = "lru"
