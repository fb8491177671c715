"""For prefixes that come back after long gaps: reused blocks outlive those used once.

    queue                holds
    speculative .. near  extras, as in `first`
    single               blocks that were used once
    reused               blocks that were hit, or came back after their eviction

After the extras, the oldest single block is evicted, unless the oldest reused block became free more than
`reuse_bonus_s` seconds before it. With 0 this is `first`; with 1e9 reused blocks are evicted only when no single block
is left. The last evicted hashes are remembered, `ghost_factor` times the pool's size, without a gap: with a gap, one
block of a prefix that came back would count as single, and after its early eviction the rest of the prefix could not
be hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtune.core import state
from kvtune.core.policies import PoolView
from kvtune.core.policies.in_order import AGED, EXTRAS, First
from kvtune.core.policies.remembered import Remembered
from kvtune.knobs import CoreSettings

SINGLE, REUSED = AGED, AGED + 1


class TwoClass(First):
    name = "two_class"
    queues = (*EXTRAS, "single", "reused")

    def __init__(self, pool: PoolView, settings: CoreSettings) -> None:
        super().__init__(pool, settings)
        self.bonus_s = settings.reuse_bonus_s
        self.ghost_size = int(settings.ghost_factor * pool.num_blocks)
        self.reset()

    def reset(self) -> None:
        self.reused = bytearray(self.pool.num_blocks)
        self.freed_s = array("d", bytes(8 * self.pool.num_blocks))
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
        head, before, freed_s = self.pool.head, self.pool.before, self.freed_s
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
