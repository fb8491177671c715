"""The pool's operations per second: stock's BlockPool, the tiered pool, a deque with linear removal. Prints a table.

    python tests/bench/pool.py [--blocks 1000,10000,200000] [--policy tiered]

Each pool holds that many hashed free blocks. An operation is one block: taken (evicting its hash), given back, hit
(touched in a random place of the queue, then given back), looked up. What must be flat in the pool's size is ours.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from kvtune.core.pool import TieredPool
from kvtune.core.settings import parse

AT_ONCE = 16
SECONDS = 0.4


class Named:
    """As much of a request as cache_full_blocks reads."""

    def __init__(self, first: int, count: int) -> None:
        self.block_hashes = [b"%032d" % (first + i) for i in range(count)]


def filled(size: int, policy: str) -> Any:
    pool = BlockPool(size + 1, enable_caching=True, hash_block_size=16)
    if policy:
        pool.__class__ = TieredPool
        pool.adopt_tiers(policy, parse({"policy": policy, "reuse_bonus_s": 100.0}))
    blocks = pool.get_new_blocks(size)
    pool.cache_full_blocks(Named(0, size), blocks, 0, size, 16, 0)
    pool.free_blocks(blocks)
    return pool


class DequePool:
    """A deque of free ids: O(1) at its ends, linear in the middle. What the linked queues are for."""

    def __init__(self, size: int) -> None:
        self.free: deque[int] = deque(range(size))

    def take_and_give(self) -> None:
        taken = [self.free.popleft() for _ in range(AT_ONCE)]
        self.free.extend(taken)

    def hit(self, chosen: list[int]) -> None:
        for block in chosen:
            self.free.remove(block)
        self.free.extend(chosen)


def per_second(step: Callable[[], int]) -> float:
    """Blocks a second over SECONDS."""
    step()
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        done += step()
    return done / (time.perf_counter() - started)


def measure(size: int, policy: str) -> dict[str, float]:
    chance = random.Random(size)
    pool = filled(size, policy)
    fresh = [size]

    def take_and_give() -> int:
        blocks = pool.get_new_blocks(AT_ONCE)
        pool.cache_full_blocks(Named(fresh[0], AT_ONCE), blocks, 0, AT_ONCE, 16, 0)
        fresh[0] += AT_ONCE
        pool.free_blocks(blocks)
        return AT_ONCE

    def hit() -> int:
        blocks = [pool.blocks[chance.randrange(1, size + 1)]]
        pool.touch(blocks)
        pool.free_blocks(blocks)
        return 1

    names = [b"%032d" % chance.randrange(size) for _ in range(1000)]

    def look_up() -> int:
        for name in names:
            pool.get_cached_block(name, [0])
        return len(names)

    return {
        "take, hash, give": per_second(take_and_give),
        "hit": per_second(hit),
        "look up": per_second(look_up),
    }


def measure_deque(size: int) -> dict[str, float]:
    chance = random.Random(size)
    pool = DequePool(size)

    def take_and_give() -> int:
        pool.take_and_give()
        return AT_ONCE

    def hit() -> int:
        pool.hit([chance.randrange(size)])
        return 1

    return {"take, hash, give": per_second(take_and_give), "hit": per_second(hit)}


def main() -> None:
    parser = argparse.ArgumentParser(description="blocks a second, by pool and size")
    parser.add_argument("--blocks", default="1000,10000,200000")
    parser.add_argument("--policy", default="lru,tiered,two_class")
    options = parser.parse_args()
    columns = ("take, hash, give", "hit", "look up")
    print(
        f"{'pool':12s} {'blocks':>8s} "
        + " ".join(f"{name:>18s}" for name in columns)
        + "   (1,000 blocks a second)"
    )
    for size in map(int, options.blocks.split(",")):
        rows = {"stock": measure(size, "")}
        rows |= {policy: measure(size, policy) for policy in options.policy.split(",")}
        rows["deque"] = measure_deque(size)
        for name, found in rows.items():
            cells = (f"{found[c] / 1000:18,.1f}" if c in found else f"{'-':>18s}" for c in columns)
            print(f"{name:12s} {size:8d} " + " ".join(cells), flush=True)


if __name__ == "__main__":
    main()
