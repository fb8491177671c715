"""Host cost of a decode step, stock against ours: schedule() and update_from_output(), microseconds a request.

Both schedulers run in this process and take turns step by step, so that whatever else the machine does hits both.
The ratio is of summed times over blocks of steps; its interval is a bootstrap over those blocks.

    python tests/tools/bench/steps.py [--steps 160] [--batches 256,1024] [--block 16]
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np

from kvtune.core.steps import scheduler
from kvtune.knobs import CoreSettings
from tests.core import steady_rig as rig

WARM_STEPS = 24
STEPS_A_BLOCK = 16  # one block of tokens at --block 16: every request has had each of its events once

LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"windows": (128, 128)},
    "states": {"states": 8},  # as many groups as packed blocks have
}


class Side:
    """One scheduler that decodes `batch` requests for ever."""

    def __init__(self, shape: rig.Shape, batch: int, settings: CoreSettings | None) -> None:
        self.scheduler = rig.build(shape)
        if settings is not None:
            scheduler.adopt(self.scheduler, settings)
        self.depth = 2 if shape.asynchronous else 1
        self.queue: deque[Any] = deque()
        chance = random.Random(0)
        for i in range(batch):
            prompt = [chance.randrange(rig.VOCAB) for _ in range(chance.randrange(32, 96))]
            self.scheduler.add_request(rig.request(f"r-{i}", prompt, 1 << 20, block=shape.block))

    def step(self) -> tuple[float, float]:
        """Seconds in schedule and in update_from_output."""
        start = perf_counter()
        scheduled = self.scheduler.schedule()
        scheduling = perf_counter() - start
        names = list(scheduled.num_scheduled_tokens)
        # With states a prompt may take several steps; only its last one samples.
        asked = [self.scheduler.requests[name] for name in names]
        output = rig.ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] if r.num_computed_tokens >= r.num_prompt_tokens else [] for r in asked],
        )
        self.queue.append((scheduled, output))
        if len(self.queue) < self.depth:
            return scheduling, 0.0
        scheduled, output = self.queue.popleft()
        start = perf_counter()
        self.scheduler.update_from_output(scheduled, output)
        return scheduling, perf_counter() - start


def interval(ours: np.ndarray, stock: np.ndarray) -> tuple[float, float]:
    """95 % of the ratio of sums, blocks resampled in pairs."""
    chance = np.random.default_rng(0)
    picks = chance.integers(0, len(ours), (2000, len(ours)))
    low, high = np.quantile(ours[picks].sum(1) / stock[picks].sum(1), (0.025, 0.975))
    return float(low), float(high)


def measure(shape: rig.Shape, batch: int, steps: int) -> str:
    sides = [Side(shape, batch, None), Side(shape, batch, CoreSettings())]
    for _ in range(WARM_STEPS):
        for side in sides:
            side.step()
    gc.collect()
    gc.freeze()
    times = np.empty((steps, 2, 2))
    for i in range(steps):
        for at in (0, 1) if i % 2 else (1, 0):
            times[i, at] = sides[at].step()
    gc.unfreeze()
    ours = sides[1].scheduler
    assert ours.steady_steps >= steps, "the steady path was not taken"
    us = times.mean(axis=0) * 1e6 / batch
    blocks = times.sum(axis=2)[: steps // STEPS_A_BLOCK * STEPS_A_BLOCK]
    stock_s, ours_s = blocks.reshape(-1, STEPS_A_BLOCK, 2).sum(axis=1).T
    low, high = interval(ours_s, stock_s)
    return (
        f"{us[0, 0]:8.2f} {us[0, 1]:7.2f}   {us[1, 0]:8.2f} {us[1, 1]:7.2f}   "
        f"{ours_s.sum() / stock_s.sum():5.3f}  [{low:.3f}, {high:.3f}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batches", default="256,1024")
    parser.add_argument("--block", type=int, default=16)
    asked = parser.parse_args()
    print("microseconds a request and step        stock              kvtune")
    print("scheduler  layers  batch    schedule  update   schedule  update   ratio  95 %")
    for asynchronous in (False, True):
        for layers, groups in LAYERS.items():
            for batch in map(int, asked.batches.split(",")):
                shape = rig.Shape(
                    asynchronous=asynchronous,
                    **groups,
                    blocks=200_000,
                    block=asked.block,
                    seqs=batch,
                    batched=131_072,
                    max_len=100_000,
                )
                row = measure(shape, batch, asked.steps)
                kind = "async" if asynchronous else "sync"
                print(f"{kind:10} {layers:7} {batch:5}    {row}", flush=True)


if __name__ == "__main__":
    main()
