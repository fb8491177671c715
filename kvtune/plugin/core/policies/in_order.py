"""Policies that evict queue by queue, each queue oldest first: `lru` as stock, `first` (the default), `pin`.

`first`, the default with sliding windows, evicts extras first, other blocks by age as in stock.

    queue        holds                                                        given out
    speculative  windows at doubling distances before a prompt's end          first
    far          slack for new suffixes                                       then
    near         slack close to a prompt's end; windows at an output's end    then
    aged         what stock keeps: full attention, windows at prompts' ends   last

An extra never takes the place of a block that stock would still have. It becomes an ordinary block if a prompt hits it
for which stock would keep the same window.

`pin`, a published policy, pins the windows at the ends of prefill chunks: they are evicted last, the oldest pin first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.policies import FAR, NEAR, OUTPUT, SPECULATIVE, WINDOW, PoolView


class InOrder:
    """Base of all policies: evicts from the first queue that is not empty, and places every block in the last queue."""

    name = "in_order"
    queues: tuple[str, ...] = ("aged",)
    extras_first = False
    """Whether extras are evicted before all blocks that stock keeps, so that those stay as long as in stock."""

    def __init__(self, pool: PoolView, settings: CoreSettings) -> None:
        self.pool = pool

    def place(self, block_ids: Sequence[int]) -> list[int]:
        return [len(self.queues)] * len(block_ids)

    def choose(self, wanted: int) -> tuple[int, int]:
        size = self.pool.size
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


EXTRAS = ("speculative", "far", "near")
AGED = len(EXTRAS) + 1


class First(InOrder):
    name = "first"
    queues: tuple[str, ...] = (*EXTRAS, "aged")
    extras_first = True
    queue_of: ClassVar[Mapping[int, int]] = {SPECULATIVE: 1, FAR: 2, NEAR: 3, OUTPUT: 3, WINDOW: AGED}

    def place(self, block_ids: Sequence[int]) -> list[int]:
        queue_of, grade_of = self.queue_of, self.pool.grade_of
        return [queue_of[grade_of[block_id]] for block_id in block_ids]


UNPINNED, PINNED = 1, 2


class Pin(InOrder):
    """Grade SPECULATIVE marks a pinned block here: one of the window at a chunk's end (see cache/windows.py)."""

    name = "pin"
    queues = ("aged", "pinned")

    def place(self, block_ids: Sequence[int]) -> list[int]:
        grade_of = self.pool.grade_of
        return [PINNED if grade_of[block_id] == SPECULATIVE else UNPINNED for block_id in block_ids]
