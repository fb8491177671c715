"""Suits conversations: windows at outputs' ends are evicted by age, windows before the latest turn first.

    queue        holds
    speculative  windows before the slack; any window after which a conversation went on
    far, near    slack
    aged         what stock keeps, and windows at outputs' ends, where next turns resume

All else is as in `first`. If a prompt hits a window that a conversation left (a turn is answered again), the window
goes back to the queue of its grade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.policies import OUTPUT, SPECULATIVE, PoolView
from kvtune.plugin.core.policies.in_order import AGED, First


class Chat(First):
    name = "chat"
    queue_of: ClassVar[Mapping[int, int]] = {**First.queue_of, OUTPUT: AGED}

    def __init__(self, pool: PoolView, settings: CoreSettings) -> None:
        super().__init__(pool, settings)
        self.reset()

    def reset(self) -> None:
        self.was_left = bytearray(self.pool.num_blocks)

    def place(self, block_ids: Sequence[int]) -> list[int]:
        was_left, first = self.was_left, self.queue_of[SPECULATIVE]
        queues = super().place(block_ids)
        return [
            first if was_left[block_id] else queue for block_id, queue in zip(block_ids, queues, strict=True)
        ]

    def left(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.was_left[block_id] = 1

    def hit(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.was_left[block_id] = 0

    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        self.hit(block_ids)
