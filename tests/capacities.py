"""Whole answers of `kvtune capacity` with a bench that answers at once: a given curve stands for the replays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvtune.answers.capacity.question import Question, answer
from kvtune.answers.capacity.replays import Bench, Seed, Task, Window
from kvtune.answers.capacity.result import Capacity
from kvtune.base.errors import KvtuneError
from kvtune.data.flags import flag_value
from kvtune.data.run.types import EngineInfo
from kvtune.lab.setup.setup import Setup

GROUP = {"kind": "FullAttentionSpec", "layers": 80, "page_bytes": 65_536, "block_size": 16}
ENGINE = EngineInfo(
    block_size=16,
    num_blocks=33_379,
    max_model_len=131_072,
    groups=[GROUP],
    settings={"max_num_batched_tokens": 8192, "max_num_seqs": 256},
)
Curve = Callable[[float, int], float]
"""The share of the hits that a number of sessions keeps, with a seed."""


def smooth(sessions: float = 12.0, power: float = 1.5, noise: float = 0.0, spread: float = 0.1) -> Curve:
    """Return a curve that keeps 90 % at about `sessions`: seeds differ there by `spread`, shares by `noise`."""

    def kept(count: float, seed: int) -> float:
        own = sessions * (1 + spread * random.Random(seed).uniform(-1, 1))
        return max(0.0, 1 - 0.1 * (count / own) ** power + random.Random(f"{count} {seed}").gauss(0, noise))

    return kept


class Quick(Bench):
    """Replays by the curve. A pool of twice the blocks, or a host tier, counts as half as many sessions."""

    engine_info: EngineInfo = ENGINE
    curve: Curve = staticmethod(smooth())
    fails: str = ""
    twice: bool = False
    waiting: float = 0.0

    def engine(self, setup: Setup) -> EngineInfo:
        return self.engine_info

    @property
    def is_free(self) -> bool:
        return len(self.running) < 2

    def begin(self, task: Task) -> None:
        number = self.replays + len(self.running)
        self.pace.at_once = 2
        self.pace.begin(number, task.work(self.window))
        self.running[number] = task

    def ended(self) -> Task:
        number = min(self.running)
        self.pace.end(number, 0.5)
        return self.take(number)

    def take(self, number: int) -> Task:
        """Note what a replay shows that has ended."""
        self.replays += 1
        task = self.running.pop(number)
        flags = task.setup.engine_args
        if self.fails and self.fails in flags:
            self.made[task] = KvtuneError(f"no {self.fails} here", "leave it out")
            return task
        self.made[task] = self.figures(task)
        if not task.change:
            self.parts[task.sessions, task.seed] = self.figures(task)
        return task

    def figures(self, task: Task) -> Seed:
        flags = task.setup.engine_args
        blocks = int(flag_value(flags, "num-gpu-blocks-override") or self.engine_info.num_blocks)
        more = blocks / self.engine_info.num_blocks * (2 if "--kv-offloading-size" in flags else 1)
        some = 40 if self.twice and "--watermark" not in flags else 0
        kept = self.curve(task.sessions / more, task.seed)
        return Seed(
            seed=task.seed,
            kept=kept,
            hit_rate=0.9 * kept,
            infinite=0.9,
            requests=100 * task.sessions,
            computed_per_output=10.0,
            waiting=self.waiting,
            ttft_p50_s=0.1,
            ttft_p99_s=0.4,
            turns_a_minute=2.0 * task.sessions,
            met=max(0.0, 1 - task.sessions * 0.02) if self.slo else None,
            preempted=int(some > 0),
            computed_twice={"evicted": some, "partial_block": some // 4} if some else {},
            computed_tokens=1000,
            busy=0.5,
            pool_mean=0.2,
            pool_most=0.5,
        )


def found(
    spec: str,
    *,
    curve: Curve | None = None,
    fails: str = "",
    twice: bool = False,
    waiting: float = 0.0,
    info: EngineInfo = ENGINE,
    phase: Callable[[str], None] = lambda _: None,
    kind: type[Quick] = Quick,
    **asked: Any,
) -> Capacity:
    def made(wanted: str, hours: float, window: Window) -> Bench:
        bench = kind(None, wanted, hours, window)  # type: ignore[arg-type]
        bench.curve, bench.fails, bench.engine_info = curve or smooth(), fails, info
        bench.twice, bench.waiting = twice, waiting
        return bench

    setup = asked.pop("setup", Setup(model="m"))
    return answer(Question(model="m", spec=spec, setup=setup, **asked), made, phase)
