"""CPU microseconds that admission by cached prefix adds to a schedule() call, by how many requests wait.

    python tests/bench/admission_cost.py [--waiting 10,1000,10000] [--calls 40]

vLLM's real scheduler, one request slot, prompts of 4,096 tokens in blocks of 16. Each call admits one
request (the one before has just been answered). `none`: nobody has anything in the cache; `half`: every second prompt
begins with a cached prefix of 2,048 tokens; `stored`: all wait for one prefix, stored in parts between the calls.
`choosing` is the queue's own part (peek and pop), `arrival` is add_request(), whose look-ups are left to the calls. The
two orders admit different requests, so `choosing` is what the order costs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvtune.core.settings import parse
from tests.core.steady_rig import RequestStatus, Shape, admission, build, request

BLOCK = 16
SHAPE = Shape(blocks=60_000, block=BLOCK, seqs=1, batched=8192, max_len=5000)
PREFIX, PROMPT = 2048, 4096
LOADS = ("none", "half", "stored")


class Named:
    """As much of a request as cache_full_blocks reads."""

    def __init__(self, block_hashes: list[Any]) -> None:
        self.block_hashes = block_hashes


def prompts(load: str, count: int) -> list[list[int]]:
    chance = random.Random(1)
    shared = [chance.randrange(512) for _ in range(PREFIX)]
    made = []
    for number in range(count):
        tail = [number % 512, number // 512] * ((PROMPT if load == "none" else PROMPT - PREFIX) // 2)
        made.append(tail if load == "none" or (load == "half" and number % 2) else shared + tail)
    return made


def cpu_us(work: Callable[[], Any]) -> float:
    begun = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - begun) / 1000


def measured(load: str, waiting: int, calls: int, ours: bool) -> tuple[list[float], list[float], list[float]]:
    """Of each schedule() call: all of it, and the queue's part; of each add_request()."""
    scheduler = build(SHAPE)
    if ours:
        admission.adopt(scheduler, parse({"admission": "longest_prefix"}))
    made = [request(f"r-{n}", p, 1, block=BLOCK) for n, p in enumerate(prompts(load, waiting + calls))]
    pool = scheduler.kv_cache_manager.block_pool
    hot = Named(made[0].block_hashes[: PREFIX // BLOCK])

    def store(begin: int, end: int) -> None:
        held = pool.get_new_blocks(end - begin)
        pool.cache_full_blocks(hot, [None] * begin + held, begin, end, BLOCK, 0)
        pool.free_blocks(reversed(held))

    if load == "half":
        store(0, PREFIX // BLOCK)
    arrivals = [cpu_us(lambda one=one: scheduler.add_request(one)) for one in made]  # type: ignore[misc]
    scheduler.current_step += 2
    result, chosen, figures = [], [], [0.0]
    for name in ("peek_request", "pop_request"):
        setattr(scheduler.waiting, name, timed(getattr(scheduler.waiting, name), figures))
    for call in range(calls):
        if load == "stored" and call < PREFIX // BLOCK // 4:
            store(4 * call, 4 * call + 4)
        figures[0] = 0.0
        result.append(cpu_us(scheduler.schedule))
        chosen.append(figures[0])
        scheduler.finish_requests(
            [one.request_id for one in scheduler.running], RequestStatus.FINISHED_ABORTED
        )
    return result, chosen, arrivals


def timed(work: Callable[[], Any], spent_us: list[float]) -> Callable[[], Any]:
    def inner() -> Any:
        begun = time.thread_time_ns()
        try:
            return work()
        finally:
            spent_us[0] += (time.thread_time_ns() - begun) / 1000

    return inner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--waiting", default="10,1000,10000")
    parser.add_argument("--calls", type=int, default=400)
    options = parser.parse_args()
    print(
        "| load | waiting | call us: stock | ours | choosing: stock | ours | largest | arrival: stock | ours |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for load in LOADS:
        for waiting in map(int, options.waiting.split(",")):
            theirs = measured(load, waiting, options.calls, ours=False)
            mine = measured(load, waiting, options.calls, ours=True)
            calls, choosing, arrivals = (
                tuple(map(statistics.median, two)) for two in zip(theirs, mine, strict=True)
            )
            print(
                f"| {load} | {waiting} | {calls[0]:.0f} | {calls[1]:.0f} | {choosing[0]:.1f} | {choosing[1]:.0f} | "
                f"{max(mine[1]):.0f} | {arrivals[0]:.1f} | {arrivals[1]:.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
