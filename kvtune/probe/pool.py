"""What a block pool gave out and demoted since it was last asked: stock's queue or the core's tiers. EngineCore, sim.

A hashed block that is given out loses its content: it is evicted. The core's tiers count by themselves; stock's queue
is watched where blocks leave it (one call a request that gets blocks). A step without evictions costs two comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.core.vllm_types import BlockPool, FreeQueue, KVCacheBlock
from kvtune.probe.records import MOST_TIERS

HASHED = (
    2  # kvtune.core.cache.pool: queue 0 is none, 1 holds blocks without a hash, the policy's tiers follow
)


class PoolWatch:
    """One pool's evictions and demotions by tier; `tiers` are their names, in the order they are given out."""

    def __init__(self, pool: BlockPool) -> None:
        queue = pool.free_block_queue
        if hasattr(queue, "taken"):
            self.tiers: tuple[str, ...] = tuple(queue.names[1:])
            self._evicted, self._demoted = queue.taken, queue.demoted
            self._from = HASHED
        else:
            self.tiers = ("least recently used",)
            self._evicted, self._demoted = [0], [0]
            self._from = 0
            self._count(queue)
        if len(self.tiers) > MOST_TIERS:
            raise ValueError(f"a pool of {len(self.tiers)} tiers, of {MOST_TIERS} at most")
        self._seen = list(self._evicted), list(self._demoted)

    def _count(self, queue: FreeQueue) -> None:
        take, evicted = queue.popleft_n, self._evicted

        def counted(n: int) -> list[KVCacheBlock]:
            blocks = take(n)
            evicted[0] += sum([block._block_hash is not None for block in blocks])
            return blocks

        queue.popleft_n = counted  # type: ignore[method-assign]

    def news(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Blocks evicted and demoted by tier since the last call; None when there are none."""
        if self._evicted == self._seen[0] and self._demoted == self._seen[1]:
            return None
        start = self._from
        found = tuple(
            [now - before for now, before in zip(counts[start:], seen[start:], strict=True)]
            for counts, seen in zip((self._evicted, self._demoted), self._seen, strict=True)
        )
        self._seen = list(self._evicted), list(self._demoted)
        return (found[0], found[1]) if any(found[0]) or any(found[1]) else None
