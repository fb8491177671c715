"""Starts a simulator process, gives it jobs (some in parallel) and reads their runs. Imports no vLLM.

The one way to ask for replays: one that a command made before, in this process or another, is read and not made again.

`with Simulators() as simulators: for number, outcome in simulators.run(setups): ...`
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from kvtune.base import children
from kvtune.base.dialogue import Dialogue, Refused
from kvtune.base.errors import KvtuneError
from kvtune.base.scratch import scratch
from kvtune.data.platforms import Platform
from kvtune.data.run.file import SUFFIX, read_run
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.saved import saved_replays
from kvtune.lab.sim.worker import ReplayJob, Report, gpu

STOP_S = 20.0
ENVIRONMENT = {"KVTUNE_PROBE": "off", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}
"""Environment variables of a simulator process. PYTHONHASHSEED makes replays repeatable: vLLM keeps the names of
requests that end in one step in a set, whose order decides which of them a full tier of host memory still stores.
"""


def replays_at_once() -> int:
    """Return the default number of parallel replays: one per core, at most 2."""
    return max(1, min(2, len(os.sched_getaffinity(0))))


class Simulators:
    """Runs up to `parallel` replays at once (default: one per core, at most 2). Entering does not wait for the process.

    `model` and `platform`, if most jobs have them: the process prepares itself for these. It takes any job.
    `interpreter`: whose vLLM is simulated. `made`: how many replays began; others had been made before.
    """

    def __init__(
        self,
        parallel: int | None = None,
        model: str = "",
        platform: Platform | None = None,
        interpreter: children.Interpreter = children.THIS,
    ) -> None:
        self._interpreter = interpreter
        self.parallel = parallel or replays_at_once()
        self.running: set[int] = set()
        self.made = 0
        self._saved = saved_replays() if interpreter == children.THIS else None
        self._names: dict[int, str] = {}  # by which running replays are saved
        self._read: list[tuple[int, Run]] = []
        self._queued: list[ReplayJob] = []
        self._model, self._platform_key = model, gpu(platform)
        self._worker: Dialogue[Report | Refused] | None = None
        self._ready = False

    def __enter__(self) -> Simulators:
        self._scratch = scratch("sim")
        self._folder = self._scratch.__enter__()
        self._worker = Dialogue(
            Report | Refused,
            "kvtune.lab.sim.worker",
            *(self._model, self._platform_key),
            interpreter=self._interpreter,
            variables=ENVIRONMENT,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            child = self._worker.child
            self._worker.close()
            try:
                if not self._ready:  # no replay has begun
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
            self._worker.end()
        self._scratch.__exit__(None, None, None)

    def run(
        self, setups: Iterable[Setup], watch: Callable[[Report], None] | None = None
    ) -> Iterator[tuple[int, Run | KvtuneError]]:
        """Replay each set-up's load; yield (its place among the set-ups, run or error) in the order in which they end.

        The first begin at once; each other set-up is taken when a simulator is free for it.
        """
        waiting = enumerate(setups)
        self._fill(waiting)
        return self._ended(waiting, watch)

    def _fill(self, waiting: Iterator[tuple[int, Setup]]) -> None:
        while len(self.running) < self.parallel and (ready := next(waiting, None)):
            self.submit(*ready)

    def _ended(
        self, waiting: Iterator[tuple[int, Setup]], watch: Callable[[Report], None] | None
    ) -> Iterator[tuple[int, Run | KvtuneError]]:
        while self.running:
            ended = self.next_done(watch)
            self._fill(waiting)
            yield ended

    def outcomes(
        self, setups: Iterable[Setup], watch: Callable[[Report], None] | None = None
    ) -> list[Run | KvtuneError]:
        """Replay the set-ups, and return the run or error of each in their order."""
        return [outcome for _, outcome in sorted(self.run(setups, watch), key=lambda ended: ended[0])]

    def replay(self, setup: Setup, watch: Callable[[Report], None] | None = None) -> Run:
        """Replay one set-up and return its run. KvtuneError if that fails."""
        (outcome,) = self.outcomes([setup], watch)
        if isinstance(outcome, KvtuneError):
            raise outcome
        return outcome

    def submit(self, number: int, setup: Setup, *, again: bool = False) -> None:
        """Queue a job; it starts as soon as a slot is free. `next_done` returns `number` with the run.

        `again`: make the replay also if it was made before.
        """
        setup = setup.with_load(setup.load.built())
        name = self._saved.name(setup) if self._saved is not None else ""
        if self._saved is not None and not again and (run := self._saved.run(name)) is not None:
            self.running.add(number)
            self._read.append((number, run))
            return
        self._names[number] = name
        self._queued.append(ReplayJob(number=number, setup=setup, out=str(self._out(number))))
        self._send()

    def next_done(self, progress: Callable[[Report], None] | None = None) -> tuple[int, Run | KvtuneError]:
        """Wait for the next job that ends; return its number and its run or error."""
        if self._read:
            number, run = self._read.pop()
            self._end(number)
            return number, run
        while True:
            report = self._receive()
            if isinstance(report, Report) and report.kind == "progress":
                if progress is not None:
                    progress(report)
            elif report.number in self.running:
                self._end(report.number)
                return report.number, self._outcome(report)

    def _end(self, number: int) -> None:
        self.running.discard(number)
        self._send()

    def stop(self) -> None:
        """End the running jobs early, with partial runs; the last call. KeyboardInterrupt if no replay has begun."""
        if not self._ready:
            raise KeyboardInterrupt
        self._queued.clear()
        assert self._worker is not None
        self._worker.close()

    def _send(self) -> None:
        assert self._worker is not None
        while self._queued and len(self.running) < self.parallel:
            job = self._queued.pop(0)
            try:
                self._worker.ask(job)
            except EOFError:
                raise self._dead() from None
            self.running.add(job.number)
            self.made += 1

    def _receive(self) -> Report | Refused:
        """Wait for the next report. Raise KvtuneError if the process has ended."""
        assert self._worker is not None
        while True:
            try:
                report = self._worker.answer()
            except EOFError:
                raise self._dead() from None
            if isinstance(report, Refused) and report.number < 0:
                raise report.error()
            self._ready = True
            if isinstance(report, Refused) or report.kind != "ready":
                return report

    def _outcome(self, report: Report | Refused) -> Run | KvtuneError:
        if isinstance(report, Refused):
            return report.error()
        path, name = self._out(report.number), self._names.pop(report.number)
        run = read_run(path)
        if self._saved is not None and name and run.header.state == "complete":
            self._saved.add(name, path)
        path.unlink()
        return run

    def _out(self, number: int) -> Path:
        return self._folder / f"{number}{SUFFIX}"

    def _dead(self) -> KvtuneError:
        assert self._worker is not None
        reason = self._worker.last_line() or "its log is empty"
        return KvtuneError(f"the simulator process ended: {reason}", "run the command again with --debug")
