"""The published policy: windows that a prompt's chunk ends leave behind are pinned, and given out last.

Under pressure the oldest pin is demoted first, to the end of the aged queue's life: it is the next block given out.
"""

from __future__ import annotations

from kvtune.core.policies import SPECULATIVE
from kvtune.core.policies.lru import InOrder

AGED, PINNED = 1, 2


class Pin(InOrder):
    """Grade SPECULATIVE marks a pin here: the window at the end of a chunk (see cache/windows.py)."""

    name = "pin"
    tiers = ("aged", "pinned")

    def place(self, block_id: int, grade: int) -> int:
        return PINNED if grade == SPECULATIVE else AGED
