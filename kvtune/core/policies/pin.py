"""A published policy: the windows at the ends of prefill chunks are pinned, which means evicted last.

When only pinned blocks are left, the oldest pin is evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.core.policies import SPECULATIVE
from kvtune.core.policies.lru import InOrder

AGED, PINNED = 1, 2


class Pin(InOrder):
    """Grade SPECULATIVE marks a pinned block here: one of the window at a chunk's end (see cache/windows.py)."""

    name = "pin"
    queues = ("aged", "pinned")

    def place(self, block_ids: Sequence[int]) -> list[int]:
        grade_of = self.shelves.grade_of
        return [PINNED if grade_of[block_id] == SPECULATIVE else AGED for block_id in block_ids]
