"""The parent's side of simulated trials: one simulator process, two replays at once. Imports no vLLM.

`SimPool.submit` hands a trial over, `next_done` waits for any that ended: answered, refused, or dead with its cause.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from kvtune.errors import KvtuneError
from kvtune.sim.cost import NOMINAL, StepCost
from kvtune.sim.settings import SimSettings
from kvtune.tune.sim_worker import Answer, Ask
from kvtune.tune.trial import Bench, Settings, core_part, flags_of

START_S = 300.0
"""Importing vLLM takes 10 s on an idle machine, far more where the disk is busy."""


class SimPool:
    """Start with `with`. `at_once` replays run side by side; the core of a trial is stock or the bench's."""

    def __init__(self, bench: Bench, cost: StepCost = NOMINAL) -> None:
        self.bench = bench
        self.cost = cost
        self.at_once = max(1, min(2, len(os.sched_getaffinity(0))))
        self._folder = Path(tempfile.mkdtemp(prefix="kvtune-sim-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._lines: list[tuple[int, int]] = []
        self._rest = b""
        self.running: set[int] = set()

    def __enter__(self) -> Self:
        bench = self.bench
        self._process = subprocess.Popen(
            [
                sys.executable,
                *(
                    "-m",
                    "kvtune.tune.sim_worker",
                    str(self._folder),
                    bench.spec,
                    str(bench.seed),
                    bench.model,
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._folder / "log").open("wb"),
            bufsize=0,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def free(self) -> bool:
        """Whether another trial may be submitted now."""
        return len(self.running) < self.at_once

    def submit(self, number: int, settings: Settings, *, stock: bool = False, keep_run: str = "") -> None:
        """Hand trial `number` over; it begins at once."""
        bench = self.bench
        core = "stock" if stock else bench.core
        sim = SimSettings(
            model=bench.model,
            engine_args=flags_of(bench, settings),
            core=core,
            core_settings={**bench.core_settings, **core_part(settings)} if core == "kvtune" else {},
            mode="jump",
            cost=self.cost,
        )
        ask = Ask(settings=sim, keep_run=keep_run)
        (self._folder / f"{number}.ask").write_bytes(msgspec.json.encode(ask))
        self._await_ready()
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(f"{number}\n".encode())
        except BrokenPipeError as error:
            raise self._died() from error
        self.running.add(number)

    def next_done(self) -> tuple[int, Answer]:
        """The next trial that ended; a fork that died without an answer says how."""
        while not self._lines:
            self._read(None)
        number, status = self._lines.pop(0)
        self.running.discard(number)
        path = self._folder / f"{number}.answer"
        if path.exists():
            return number, msgspec.json.decode(path.read_bytes(), type=Answer)
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return number, Answer(failed=f"the simulator process of this trial {how}", hint=self._log_tail())

    def _await_ready(self) -> None:
        while not self._ready:
            self._read(START_S)

    def _read(self, timeout_s: float | None) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        descriptor = process.stdout.fileno()
        if not select.select([descriptor], [], [], timeout_s)[0]:
            raise KvtuneError(
                f"the simulator did not start within {timeout_s:.0f} s", "see what keeps the machine busy"
            )
        chunk = os.read(descriptor, 65536)
        if not chunk:
            raise self._died()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            name, _, status = line.partition(b" ")
            if name == b"ready":
                self._ready = True
            else:
                self._lines.append((int(name), int(status)))

    def _died(self) -> KvtuneError:
        tail = self._log_tail()
        return KvtuneError("the simulator process ended by itself", f"its last line: {tail}" if tail else "")

    def _log_tail(self) -> str:
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
