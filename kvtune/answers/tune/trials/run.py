r"""Trials of one set-up: plans in, what their runs showed out. Imports no vLLM.

The one loop of sweeps, searches, guards, simplification and confirmation: each hands in a list of plans.

    plan = settings, core ---> in the journal, or run before: that trial
                          \--> else its set-up, where the device says: replayed, some at once; or run, one at a time
                               ---> journal, on disk ---> `say` ---> trial
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvtune.answers.tune.result import Place, Role, Settings, Trial
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.setup import packing_failure
from kvtune.base.errors import EXIT_INTERRUPTED, EXIT_USAGE, KvtuneError
from kvtune.data.run.types import Run
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A trial to run. `stock`: with stock's core; else with the set-up's."""

    settings: Settings
    role: Role = "trial"
    stock: bool = False

    def of(self, setup: Setup) -> Setup:
        return (setup.stock() if self.stock else setup).with_knobs(self.settings)

    def key(self, place: Place, setup: Setup) -> str:
        core = "stock" if self.stock else setup.core
        return Trial(number=0, settings=self.settings, on=place, core=core, role=self.role).key


STOCK = PlannedTrial({}, "baseline", stock=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a trial's run showed: its `--json` object, or `why` it failed. `error`: a replay's, as it was raised."""

    summary: dict[str, Any] = field(default_factory=dict)
    elapsed_s: float = 0.0
    why: str = ""
    error: KvtuneError | None = None
    run_file: str = ""


class Trials(ExitStack):
    """Runs trials of a set-up, each once, where its device says. Open with `with`; the simulator starts when needed.

    `made`: all trials, those of the journal first. `say`: hears of each new one. `known`: trials that others ran.
    `output`: the folder of engines' run files.
    `failed`: hears of each replay that failed, and raises if nothing more is to be run.
    """

    def __init__(
        self,
        setup: Setup,
        journal: StudyJournal | None = None,
        say: Callable[[Trial], None] = lambda trial: None,
        lab: Lab = LAB,
        *,
        output: Path = Path(),
        done: Iterable[Trial] = (),
        failed: Callable[[PlannedTrial, KvtuneError], None] = lambda plan, error: None,
    ) -> None:
        super().__init__()
        self.setup, self.made = setup, journal.trials if journal is not None else []
        self.on: Place = "sim" if isinstance(setup.device, Simulated) else "engine"
        self._known = {trial.key: trial for trial in (*done, *self.made)}
        self._journal, self._say, self._lab, self.output, self._failed = journal, say, lab, output, failed

    def run(self, plans: Iterable[PlannedTrial], *, again: bool = False) -> list[Trial]:
        """Return each plan's trial, in their order. `again`: run those that are known, too.

        KeyboardInterrupt on Ctrl-C; UsageError if the engine refuses stock, or cannot be simulated.
        """
        planned = [(plan.key(self.on, self.setup), plan) for plan in plans]
        todo = [plan for key, plan in dict(planned).items() if again or key not in self._known]
        number = 1 + max((trial.number for trial in self.made), default=-1)
        for place, answer in (self._replay if self.on == "sim" else self._measure)(todo):
            if answer.error is not None:
                self._failed(todo[place], answer.error)
            trial = self._trial(number + place, todo[place], answer)
            (self._journal.add if self._journal is not None else self.made.append)(trial)
            self._known[trial.key] = trial
            self._say(trial)
        return [self._known[key] for key, _ in planned]

    def _trial(self, number: int, plan: PlannedTrial, answer: Answer) -> Trial:
        core, summary, why = "stock" if plan.stock else self.setup.core, answer.summary, answer.why
        if not why and self.on == "sim" and core == "kvtune" and not summary.get("core", {}).get("active"):
            why = f"the core did not run: {summary.get('core', {}).get('why', '')}"
        why = why or packing_failure(summary)
        return Trial(
            number=number,
            settings=plan.settings,
            on=self.on,
            core=core,
            role=plan.role,
            state="failed" if why else summary.get("state", "complete"),
            why=why or summary.get("why", ""),
            elapsed_s=answer.elapsed_s,
            run_file=answer.run_file,
            seed=self.setup.load.seed,
            summary=summary,
        )

    @cached_property
    def _simulated(self) -> tuple[Setup, Simulators]:
        setup = self.setup.sized()
        return setup, self.enter_context(self._lab.simulators(setup.model, setup.platform))

    def _replay(self, plans: Sequence[PlannedTrial]) -> Iterator[tuple[int, Answer]]:
        """Yield (place among the plans, answer) in the order in which the replays end."""
        if not plans:
            return
        setup, simulators = self._simulated
        begun: list[float] = []

        def setups() -> Iterator[Setup]:
            for plan in plans:
                begun.append(time.monotonic())
                yield plan.of(setup)

        for place, outcome in simulators.run(setups()):
            if isinstance(outcome, KvtuneError):
                took_s = time.monotonic() - begun[place]
                yield place, Answer(elapsed_s=took_s, why=outcome.message, error=outcome)
                continue
            replay = outcome.header.extra.sim
            took_s = (replay.elapsed_s if replay is not None else 0.0) + outcome.header.startup_s
            yield place, Answer(self._figures(outcome), took_s)

    def _measure(self, plans: Sequence[PlannedTrial]) -> Iterator[tuple[int, Answer]]:
        """Yield (place among the plans, answer) of runs on the engine, one after the other."""
        for place, plan in enumerate(plans):
            setup, began = plan.of(self.setup), time.monotonic()
            strict = {"KVTUNE_STRICT": "1"} if setup.core == "kvtune" else {}
            try:
                done = self._lab.engine(self.output, environment=strict).run(setup)
                if done.error is not None and done.error.exit_code == EXIT_INTERRUPTED:
                    raise done.error
                figures, why, file = (
                    self._figures(done.run),
                    done.error and done.error.message,
                    str(done.path),
                )
            except KvtuneError as error:
                if error.exit_code == EXIT_INTERRUPTED:
                    raise KeyboardInterrupt from error
                if error.exit_code == EXIT_USAGE and plan.role == "baseline":
                    raise  # no other trial would run either
                why = error.line
                figures, file = {}, ""
            yield place, Answer(figures, time.monotonic() - began, why or "", run_file=file)

    def _figures(self, run: Run) -> dict[str, Any]:
        from kvtune.reading.analysis.run import RunAnalysis
        from kvtune.reading.analysis.summary import summary

        load = self.setup.load
        return summary(RunAnalysis(run.with_extra(slo=load.slo), load.built()))
