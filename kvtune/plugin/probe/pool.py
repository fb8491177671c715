"""Counts the blocks that a pool evicts, by queue: stock's one queue or the core's several. EngineCore and simulator.

A free block that still has a hash is evicted when it is allocated again. The core's queues count this themselves; in
stock's queue, `popleft_n` is wrapped, which runs once for each request that gets blocks. A step without evictions costs
two comparisons.
"""

from __future__ import annotations

from kvtune.plugin.probe.records import MOST_QUEUES
from kvtune.plugin.vllm.types import BlockPool, FreeQueue, KVCacheBlock, has_queues

FIRST_HASHED = 2
"""First queue of hashed blocks in the core's pool: 0 means no queue, 1 has blocks without a hash."""


class PoolWatch:
    """Counts one pool's evictions by queue; `queues`: names of its queues, in the order of eviction."""

    def __init__(self, pool: BlockPool) -> None:
        queue = pool.free_block_queue
        if has_queues(queue):
            self.queues: tuple[str, ...] = tuple(queue.names[1:])
            self._evicted = queue.taken
            self._from = FIRST_HASHED
        else:
            self.queues = ("least recently used",)
            self._evicted = [0]
            self._from = 0
            self._count(queue)
        if len(self.queues) > MOST_QUEUES:
            raise ValueError(f"the pool has {len(self.queues)} queues, at most {MOST_QUEUES} can be recorded")
        self._seen = list(self._evicted)

    def _count(self, queue: FreeQueue) -> None:
        take, evicted = queue.popleft_n, self._evicted

        def counted(n: int) -> list[KVCacheBlock]:
            blocks = take(n)
            evicted[0] += sum([block._block_hash is not None for block in blocks])
            return blocks

        queue.popleft_n = counted  # type: ignore[method-assign]

    def news(self) -> tuple[int, ...] | None:
        """Return the blocks evicted since the last call, by queue; None if there were none."""
        if self._evicted == self._seen:
            return None
        start = self._from
        evicted = tuple(
            now - before for now, before in zip(self._evicted[start:], self._seen[start:], strict=True)
        )
        self._seen = list(self._evicted)
        return evicted if any(evicted) else None
