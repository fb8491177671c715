"""The cost of a prefix hit in the free list, by pool size: stock's linked queue, a deque searched linearly, tiers.

Run as `python -m kvtune.evidence.free_list` (imports vLLM); prints one JSON object. One operation: a cached block in a
random place of the queue is hit (taken out of it) and given back. Kinds take turns; microseconds of thread CPU time.
"""

from __future__ import annotations

import json
import random
from time import thread_time_ns
from typing import Any

SIZES = (1_000, 10_000, 200_000)
KINDS = ("stock", "linear", "tiers")
REPEATS = 5
HITS = 64


class _Named:
    """As much of a request as cache_full_blocks reads."""

    def __init__(self, count: int) -> None:
        self.block_hashes = [b"%032d" % i for i in range(count)]


def _pool(kind: str, size: int) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(size + 1, enable_caching=True, hash_block_size=16)
    if kind == "linear":
        from kvtune.core.cache.legacy import use_linear_queue

        use_linear_queue(pool)
    elif kind == "tiers":
        from kvtune.core.cache.pool import TieredPool
        from kvtune.core.settings import CoreSettings

        pool.__class__ = TieredPool
        pool.adopt_tiers("first", CoreSettings())
    blocks = pool.get_new_blocks(size)
    named: Any = _Named(size)
    pool.cache_full_blocks(named, blocks, 0, size, 16, 0)
    pool.free_blocks(blocks)
    return pool


def measure() -> dict[str, dict[str, list[float]]]:
    """Microseconds a hit, REPEATS of them, by pool size and kind."""
    draw = random.Random(0)
    times_us: dict[str, dict[str, list[float]]] = {}
    for size in SIZES:
        pools = {kind: _pool(kind, size) for kind in KINDS}
        figures: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for repeat in range(REPEATS + 1):
            chosen = [1 + draw.randrange(size) for _ in range(HITS)]
            for kind in KINDS if repeat % 2 else KINDS[::-1]:
                pool = pools[kind]
                start = thread_time_ns()
                for block_id in chosen:
                    one = [pool.blocks[block_id]]
                    pool.touch(one)
                    pool.free_blocks(one)
                if repeat:  # the first warms up
                    figures[kind].append((thread_time_ns() - start) / 1e3 / HITS)
        times_us[str(size)] = figures
    return times_us


if __name__ == "__main__":
    print(json.dumps(measure()))
