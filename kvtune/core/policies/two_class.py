"""For prefixes that come back after long gaps: as `first`, but reused blocks outlive those used once.

    queue                holds
    speculative .. near  extras, as in `first`
    single               blocks that were used once
    reused               blocks that were hit, or came back after their eviction

After the extras, the older of the two oldest blocks is evicted, the reused one only if it is older by more
than `reuse_bonus_s` seconds: with 0 this is `first`, with 1e9 single blocks go as long as there are any.
Evicted hashes are remembered for `ghost_factor` pool sizes without a gap: one missing hash would leave a
single block in the middle of a prefix that came back. It would go first, and the rest of the prefix could not
be hit any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtune.core import state
from kvtune.core.policies import Shelves
from kvtune.core.policies.first import AGED, EXTRAS, First
from kvtune.core.policies.remembered import Remembered
from kvtune.core.settings import CoreSettings

SINGLE, REUSED = AGED, AGED + 1


class TwoClass(First):
    name = "two_class"
    queues = (*EXTRAS, "single", "reused")

    def __init__(self, shelves: Shelves, settings: CoreSettings) -> None:
        super().__init__(shelves, settings)
        self.bonus_s = settings.reuse_bonus_s
        self.ghost_size = int(settings.ghost_factor * shelves.num_blocks)
        self.reset()

    def reset(self) -> None:
        self.reused = bytearray(self.shelves.num_blocks)
        self.freed_s = array("d", bytes(8 * self.shelves.num_blocks))
        self.ghost = Remembered(self.ghost_size)

    def place(self, block_ids: Sequence[int]) -> list[int]:
        now_s, freed_s, reused = state.clock(), self.freed_s, self.reused
        for block_id in block_ids:
            freed_s[block_id] = now_s
        queues = super().place(block_ids)
        return [
            REUSED if queue == SINGLE and reused[block_id] else queue
            for block_id, queue in zip(block_ids, queues, strict=True)
        ]

    def choose(self, wanted: int) -> tuple[int, int]:
        queue, count = super().choose(wanted)
        head, before, freed_s = self.shelves.head, self.shelves.before, self.freed_s
        if queue != SINGLE or head(REUSED) < 0:
            return queue, count
        single_s, reused_s = freed_s[head(SINGLE)], freed_s[head(REUSED)]
        if single_s - reused_s > self.bonus_s:
            return REUSED, max(1, before(REUSED, freed_s, single_s - self.bonus_s, wanted))
        return SINGLE, max(1, before(SINGLE, freed_s, reused_s + self.bonus_s, wanted))

    def hit(self, block_ids: Sequence[int]) -> None:
        reused = self.reused
        for block_id in block_ids:
            reused[block_id] = 1

    def stored(self, block_ids: Sequence[int], keys: Sequence[bytes], resident: bool) -> None:
        back = self.ghost.take_all(keys)
        for block_id, key in zip(block_ids, keys, strict=True):
            if resident or key in back:
                self.reused[block_id] = 1

    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        for block_id in block_ids:
            self.reused[block_id] = 0
        self.ghost.add_all(keys)
