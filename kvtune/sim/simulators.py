"""Starts a simulator process, gives it jobs (some in parallel) and reads their runs. Imports no vLLM.

`with Simulators() as simulators: for number, outcome in simulators.run(setups): ...`
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from kvtune import children
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.files import appending
from kvtune.run.file import SUFFIX, read_run
from kvtune.run.scratch import scratch
from kvtune.run.types import Run
from kvtune.sim.worker import ReplayJob, Report, gpu
from kvtune.vllm.platforms import Platform

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
    `interpreter`: whose vLLM is simulated.
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
        self._queued: list[ReplayJob] = []
        self._model, self._platform_key = model, gpu(platform)
        self._process: children.Child | None = None
        self._unread = b""
        self._ready = False

    def __enter__(self) -> Simulators:
        self._scratch = scratch("sim")
        self._folder = self._scratch.__enter__()
        log = appending(self._folder / "log")
        receive, send = os.pipe()
        try:
            self._process = children.start(
                self._interpreter.python("kvtune.sim.worker", str(send), self._model, self._platform_key),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[send],
                start_new_session=True,
                variables={**self._interpreter.variables, **ENVIRONMENT},
            )
        finally:
            os.close(send)
            log.close()
        self._reports = receive
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                if not self._ready:  # no replay has begun
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        os.close(self._reports)
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

    def submit(self, number: int, setup: Setup, command: Sequence[str] = ()) -> None:
        """Queue a job; it starts as soon as a slot is free. `next_done` returns `number` with the run."""
        setup = setup.with_load(setup.load.built())
        self._queued.append(
            ReplayJob(number=number, setup=setup, out=str(self._out(number)), command=list(command))
        )
        self._send()

    def next_done(self, progress: Callable[[Report], None] | None = None) -> tuple[int, Run | KvtuneError]:
        """Wait for the next job that ends; return its number and its run or error."""
        while True:
            report = self._receive()
            if report.kind == "progress" and progress is not None:
                progress(report)
            if report.kind in ("done", "failed") and report.number in self.running:
                self.running.discard(report.number)
                self._send()
                return report.number, self._outcome(report)

    def stop(self) -> None:
        """End the running jobs early, with partial runs; the last call. KeyboardInterrupt if no replay has begun."""
        if not self._ready:
            raise KeyboardInterrupt
        self._queued.clear()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()

    def _send(self) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        while self._queued and len(self.running) < self.parallel:
            job = self._queued.pop(0)
            try:
                process.stdin.write(msgspec.json.encode(job) + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._dead() from None
            self.running.add(job.number)

    def _receive(self) -> Report:
        """Wait for the next report. Raise KvtuneError if the process has ended."""
        while True:
            line, separator, rest = self._unread.partition(b"\n")
            if separator:
                self._unread = rest
                report = msgspec.json.decode(line, type=Report)
                if report.kind == "failed" and report.number < 0:
                    raise KvtuneError(report.message, report.hint, report.exit_code)
                self._ready = True
                if report.kind != "ready":
                    return report
                continue
            select.select([self._reports], [], [])
            chunk = os.read(self._reports, 1 << 16)
            if not chunk:
                raise self._dead()
            self._unread += chunk

    def _outcome(self, report: Report) -> Run | KvtuneError:
        if report.kind == "failed":
            return KvtuneError(report.message, report.hint, report.exit_code)
        path = self._out(report.number)
        run = read_run(path)
        path.unlink()
        return run

    def _out(self, number: int) -> Path:
        return self._folder / f"{number}{SUFFIX}"

    def _dead(self) -> KvtuneError:
        tail = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        reason = tail[-1] if tail else "its log is empty"
        return KvtuneError(f"the simulator process ended: {reason}", "run the command again with --debug")
