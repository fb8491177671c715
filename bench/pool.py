"""The pool's operations per second: stock's BlockPool, the core's pool, a deque with linear removal. Prints a table.

    python bench/pool.py [--blocks 1000,10000,200000] [--policy first]

Each pool holds that many hashed free blocks. An operation is one block: taken (evicting its hash), given back, hit
(touched in a random place of the queue, then given back), hit as one of a prompt's (looked up, too, as an engine does),
looked up. What must be flat in the pool's size is ours.
The pools take turns in short slices of CPU time, so that whatever else the machine does hits all; "x stock" is the
median of the ratios of one turn, with the middle half of them.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.cache.pool import PolicyPool
from kvtune.plugin.core.settings import parse

AT_ONCE = 16
PROMPT = 128
"""Blocks of one prompt that are hit at once: 4,096 tokens in blocks of 32."""
SLICE_S = 0.02
STEPS_A_LOOK = 4
TURNS = 20


class Named:
    """As much of a request as cache_full_blocks reads."""

    def __init__(self, first: int, count: int) -> None:
        self.block_hashes = [b"%032d" % (first + i) for i in range(count)]
        self.num_prompt_tokens = 16 * count


def filled(size: int, policy: str) -> Any:
    pool = BlockPool(size + 1, enable_caching=True, hash_block_size=16)
    if policy:
        pool.__class__ = PolicyPool
        pool.adopt_queues(policy, parse({"policy": policy, "reuse_bonus_s": 100.0}), Breaker())
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
    """Blocks a second over SLICE_S of this thread's own time."""
    done, started = 0, time.thread_time()
    while time.thread_time() - started < SLICE_S:
        for _ in range(STEPS_A_LOOK):
            done += step()
    return done / (time.thread_time() - started)


def operations(size: int, policy: str) -> dict[str, Callable[[], int]]:
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

    prompts = filled(size, policy)

    def hit_prompt() -> int:
        first = PROMPT * chance.randrange(size // PROMPT)
        blocks = [prompts.get_cached_block(b"%032d" % i, [0])[0] for i in range(first, first + PROMPT)]
        prompts.touch(blocks)
        prompts.free_blocks(reversed(blocks))
        return PROMPT

    names = [b"%032d" % chance.randrange(size) for _ in range(100)]

    def look_up() -> int:
        for name in names:
            pool.get_cached_block(name, [0])
        return len(names)

    return {"look up": look_up, "hit": hit, "hit a prompt": hit_prompt, "take, hash, give": take_and_give}


def operations_of_deque(size: int) -> dict[str, Callable[[], int]]:
    chance = random.Random(size)
    pool = DequePool(size)

    def take_and_give() -> int:
        pool.take_and_give()
        return AT_ONCE

    def hit() -> int:
        pool.hit([chance.randrange(size)])
        return 1

    return {"hit": hit, "take, hash, give": take_and_give}


def measure(sides: dict[str, dict[str, Callable[[], int]]], name: str) -> dict[str, list[float]]:
    """Rates of one operation, turn by turn."""
    able = {side: steps[name] for side, steps in sides.items() if name in steps}
    rates: dict[str, list[float]] = {side: [] for side in able}
    for turn in range(TURNS + 1):
        for side, step in able.items():
            rate = per_second(step)
            if turn:  # the first warms up
                rates[side].append(rate)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description="blocks a second, by pool and size")
    parser.add_argument("--blocks", default="1000,10000,200000")
    parser.add_argument("--policy", default="first,two_class")
    options = parser.parse_args()
    print(f"{'operation':18s} {'blocks':>8s} {'pool':12s} {'us a block':>11s}   x stock")
    for size in map(int, options.blocks.split(",")):
        sides = {"stock": operations(size, "")}
        sides |= {policy: operations(size, policy) for policy in options.policy.split(",")}
        sides["deque"] = operations_of_deque(size)
        gc.collect()
        gc.freeze()
        for name in sides["stock"]:
            rates = measure(sides, name)
            for side, rates_of_side in rates.items():
                ratios = sorted(
                    mine / stock for mine, stock in zip(rates_of_side, rates["stock"], strict=True)
                )
                low, middle, high = statistics.quantiles(ratios, n=4)
                cost_us = 1e6 / statistics.median(rates_of_side)
                print(
                    f"{name:18s} {size:8d} {side:12s} {cost_us:11.2f}   {middle:.3f} [{low:.3f}, {high:.3f}]",
                    flush=True,
                )
        gc.unfreeze()


if __name__ == "__main__":
    main()
