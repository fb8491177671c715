"""Simulated trials of a bench: settings in, run summaries out. Imports no vLLM; `sim.simulators` runs the replays."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

import msgspec

from kvtune.analysis.study import Bench, Settings
from kvtune.engine.setup import Real, Setup
from kvtune.errors import KvtuneError
from kvtune.fake_device.settings import nominal
from kvtune.run.slo import with_slo
from kvtune.sim.simulators import Simulators
from kvtune.tune.trials.flags import core_part, flags_of
from kvtune.tune.trials.like import UNMEASURED, EngineLike
from kvtune.vllm.platforms import device


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated trial's result: the run's `--json` object, or why it `failed`."""

    summary: dict[str, Any] = {}
    elapsed_s: float = 0.0
    failed: str = ""
    hint: str = ""


class SimPool:
    """Replays trials, at most two at a time; open with `with`. A trial's core is stock or the bench's.

    `like`: facts from an engine run. Raise UsageError for an engine that cannot be simulated.
    """

    def __init__(self, bench: Bench, like: EngineLike = UNMEASURED) -> None:
        from kvtune.workload.spec import build

        self.bench = like.pool_of(bench)
        self._like = like
        self._setup = Setup(
            model=bench.model,
            engine_args=self.bench.engine_args,
            platform=device(bench.like_device) if bench.like_device else None,
            device=nominal() if bench.engine_on == "host" else Real(),
        )
        self._setup = self._setup.replayed(
            mode="jump",
            cost=like.cost,
            specs=like.specs,
            async_scheduling=like.async_scheduling,
            copy=like.copy,
        ).sized()
        self.workload = build(bench.spec, seed=bench.seed)
        self._simulators = Simulators(model=bench.model)
        self._begun: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._simulators.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._simulators.__exit__(kind, error, trace)

    @property
    def running(self) -> int:
        """Number of trials that were submitted and have not ended."""
        return len(self._begun)

    @property
    def free(self) -> bool:
        """Whether a trial submitted now would start at once."""
        return self.running < self._simulators.parallel

    def submit(self, number: int, settings: Settings, *, stock: bool = False) -> None:
        """Queue trial `number`; it begins as soon as a simulator is free."""
        bench = self.bench
        core = "stock" if stock else bench.core
        core_settings = {**bench.core_settings, **core_part(settings)} if core == "kvtune" else {}
        setup = msgspec.structs.replace(
            self._setup.replayed(specs=self._like.specs_for({**settings, **core_settings})),
            engine_args=flags_of(bench, settings),
            core=core,
            core_settings=core_settings,
        )
        self._begun[number] = time.monotonic()
        self._simulators.submit(number, self.workload, setup)

    def next_done(self) -> tuple[int, Answer]:
        """Wait for the next trial that ends; return its number and result."""
        from kvtune.analysis.run import RunAnalysis
        from kvtune.analysis.summary import summary

        number, outcome = self._simulators.next_done()
        elapsed_s = time.monotonic() - self._begun.pop(number)
        if isinstance(outcome, KvtuneError):
            return number, Answer(elapsed_s=elapsed_s, failed=outcome.message, hint=outcome.hint)
        replay = outcome.header.extra.sim
        return number, Answer(
            summary=summary(RunAnalysis(with_slo(outcome, self.bench.slo), self.workload)),
            elapsed_s=(replay.elapsed_s if replay is not None else 0.0) + outcome.header.startup_s,
        )
