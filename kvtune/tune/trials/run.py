"""Trials of a set-up, simulated or on an engine: settings in, run summaries out. Imports no vLLM."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvtune.analysis.study import Role, Settings, Trial
from kvtune.engine.setup import Setup
from kvtune.errors import EXIT_INTERRUPTED, EXIT_USAGE, KvtuneError
from kvtune.lab import LAB, Lab
from kvtune.run.types import Run
from kvtune.tune.trials.setup import packing_failure


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated trial's result: the run's `--json` object, or why it `failed`."""

    summary: dict[str, Any] = {}
    elapsed_s: float = 0.0
    failed: str = ""
    hint: str = ""


class SimPool:
    """Replays trials, at most two at a time; open with `with`. A trial's core is stock or the set-up's.

    Raise UsageError for an engine that cannot be simulated.
    """

    def __init__(self, setup: Setup, lab: Lab = LAB) -> None:
        self.setup = setup.replayed().sized()
        self.workload = setup.load.built()
        self._opened = lab.simulators(setup.model, self.setup.platform)
        self._begun: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._simulators = self._opened.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

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
        setup = self.setup.stock() if stock else self.setup
        self._begun[number] = time.monotonic()
        self._simulators.submit(number, self.workload, setup.with_knobs(settings))

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
            summary=summary(RunAnalysis(outcome.with_extra(slo=self.setup.load.slo), self.workload)),
            elapsed_s=(replay.elapsed_s if replay is not None else 0.0) + outcome.header.startup_s,
        )


def engine_trial(
    setup: Setup,
    settings: Settings,
    number: int,
    *,
    stock: bool,
    role: Role,
    output: Path,
    lab: Lab = LAB,
) -> tuple[Trial, Run | None]:
    """Run a trial; return it and its run. `Trial.why` says why an engine failed. KeyboardInterrupt on Ctrl-C."""
    from kvtune.analysis.run import RunAnalysis
    from kvtune.analysis.summary import summary

    asked = (setup.stock() if stock else setup).with_knobs(settings)
    core = asked.core
    started = time.monotonic()
    engine = lab.engine(output, environment={"KVTUNE_STRICT": "1"} if core == "kvtune" else {})
    failed, run, path = "", None, ""
    try:
        done = engine.run(asked)
        run, path = done.run, str(done.path)
        if done.error is not None:
            if done.error.exit_code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt
            failed = done.error.message
    except KvtuneError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt from error
        if error.exit_code == EXIT_USAGE and role == "baseline":
            raise  # no other trial would run either
        failed = f"{error.message} ({error.hint})" if error.hint else error.message
    figures = summary(RunAnalysis(run, setup.load.built())) if run is not None else {}
    failed = failed or packing_failure(figures)
    trial = Trial(
        number=number,
        settings=settings,
        on="engine",
        core=core,
        role=role,
        state="failed" if failed else "complete",
        why=failed,
        elapsed_s=time.monotonic() - started,
        run_file=path,
        seed=setup.load.seed,
        summary=figures,
    )
    return trial, run
