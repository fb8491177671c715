"""Cost of replays and bounds: `python bench/sim.py [--trace FILE] [--limit N]`.

One line per replay, in CPU seconds of this process, which other processes on the machine do not lengthen. Without a
trace: the tiny-gemma3 rounds, to be compared with `kvtune profile tiny-gemma3 -w WORKLOAD` (its `wall_s`) on the same
machine. `--without stride,leap` leaves shortcuts out (kvtune/lab/sim/fast): what each of them saves.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim import player
from kvtune.lab.sim.replay import replay
from kvtune.lab.sim.steps import Stepper
from kvtune.reading.bounds.ladder import bounds
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Workload

ROUNDS = "rounds:prefixes=12,prefix=4000,suffix=64,output=16,rounds=3"
POOLS = (25_000, 50_000, 100_000, 200_000, 400_000)


def measure(name: str, workload: Workload, settings: Setup) -> None:
    wall, cpu = time.monotonic(), time.process_time()
    run = replay(workload, settings)
    requests = run.table("requests")
    share = requests["hit_tokens"].sum() / requests["prompt_tokens"].sum()
    print(
        f"{name:<24} {time.process_time() - cpu:8.2f} CPU-s  {time.monotonic() - wall:8.2f} s  "
        f"{run.header.extra.sim.steps:>8} steps  {100 * share:5.2f} % hits",
        flush=True,
    )


def leave_out(names: set[str]) -> None:
    """Replays from now on run without these shortcuts."""
    choose = player.steppers

    def fewer(*args: Any, **options: Any) -> tuple[Stepper, ...]:
        *fast, last = choose(*args, **options)
        for stepper in fast:
            if "leap" in names:
                stepper._leaps = False
        return (*(() if "stride" in names else fast), last)

    player.steppers = fewer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", default="")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--without", default="", help="stride, leap")
    options = parser.parse_args()
    leave_out(set(filter(None, options.without.split(","))))
    measure("first (imports)", build(ROUNDS, seed=0), Setup(model="tiny-gemma3"))
    if not options.trace:
        work = build(ROUNDS, seed=0)
        measure("tiny-gemma3", work, Setup(model="tiny-gemma3", device=Simulated()))
        return
    work = build(f"trace:path={options.trace},limit={options.limit}", seed=0)
    cpu = time.process_time()
    bounds(work, POOLS)
    print(f"{'bounds, 5 pools':<24} {time.process_time() - cpu:8.2f} CPU-s", flush=True)
    flags = ["--max-model-len", "131072", "--max-num-batched-tokens", "8192"]
    flags += ["--num-gpu-blocks-override", str(options.blocks)]
    device = Simulated(block_tokens=16, token_rows=0)
    measure("trace", work, Setup(model="tiny-llama", engine_args=flags, device=device))


if __name__ == "__main__":
    main()
