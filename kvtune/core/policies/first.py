"""The default with sliding windows: extras are evicted first, other blocks by age as in stock.

    queue        holds                                                        given out
    speculative  windows at doubling distances before a prompt's end          first
    far          slack for new suffixes                                       then
    near         slack close to a prompt's end; windows at an output's end    then
    aged         what stock keeps: full attention, windows at prompts' ends   last

Each queue is evicted oldest first, so an extra never takes the place of a block that stock would still have. An extra
becomes an ordinary block if a prompt hits it for which stock would keep the same window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvtune.core.policies import FAR, NEAR, OUTPUT, SPECULATIVE, WINDOW
from kvtune.core.policies.lru import InOrder

EXTRAS = ("speculative", "far", "near")
AGED = len(EXTRAS) + 1


class First(InOrder):
    name = "first"
    queues: tuple[str, ...] = (*EXTRAS, "aged")
    extras_first = True
    queue_of: ClassVar[Mapping[int, int]] = {SPECULATIVE: 1, FAR: 2, NEAR: 3, OUTPUT: 3, WINDOW: AGED}

    def place(self, block_ids: Sequence[int]) -> list[int]:
        queue_of, grade_of = self.queue_of, self.shelves.grade_of
        return [queue_of[grade_of[block_id]] for block_id in block_ids]
