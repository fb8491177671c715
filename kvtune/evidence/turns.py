"""Interleaved A/B: every side's engine is loaded, one runs at a time while the others are stopped.

A turn takes seconds, so pairs of turns see the same machine. Runs in the CLI's process; each side is a process of its
own (`turn_engine.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from kvtune.engine.faults import cause
from kvtune.engine.sockets import sockets_in
from kvtune.errors import KvtuneError
from kvtune.evidence.claims import Case, CaseSide
from kvtune.evidence.turn_engine import TurnPlan
from kvtune.run.cpu import VARIABLE
from kvtune.run.scratch import scratch

WARM_TURNS = 1


TurnFigures = dict[str, Any]
"""What a side measured in one turn, named as in a run's summary."""


def in_turns(case: Case, on_turn: Callable[[int], None]) -> dict[str, list[TurnFigures]]:
    """What each side measured in each turn, by the side's name. KvtuneError with the cause if an engine fails."""
    with contextlib.ExitStack() as stack:
        engines = {side.name: stack.enter_context(_Engine(case, side)) for side in case.sides}
        for engine in engines.values():
            engine.answer()  # the first line says that it is ready
        for engine in engines.values():
            engine.pause()
        measured: dict[str, list[TurnFigures]] = {name: [] for name in engines}
        for turn in range(case.turns + WARM_TURNS):
            on_turn(turn)
            for name in list(engines) if turn % 2 else reversed(list(engines)):
                figures = engines[name].turn(turn)
                if turn >= WARM_TURNS:
                    measured[name].append(figures)
    return measured


class _Engine:
    """The processes of one side: a session of its own, stopped except during its turns."""

    def __init__(self, case: Case, side: CaseSide) -> None:
        self._case, self._side = case, side

    def __enter__(self) -> _Engine:
        self._scratch = scratch("turns")
        folder = self._scratch.__enter__()
        plan = TurnPlan(self._case.model, self._case.workload, [*self._case.args, *self._side.args])
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        kept = (n for n in os.environ if n == VARIABLE or not n.startswith("KVTUNE_"))
        environment = {name: os.environ[name] for name in kept}
        environment |= {
            # KVTUNE_RUN_DIR makes vLLM's processes end with the one that started them, even if it was killed.
            "KVTUNE_RUN_DIR": str(folder),
            **sockets_in(folder),
            "KVTUNE_PROBE": "off",
            "KVTUNE_CORE": self._side.core,
            "KVTUNE_STRICT": "1",
            "KVTUNE_SET": msgspec.json.encode(self._side.settings).decode(),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        self._log = folder / "log"
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtune.evidence.turn_engine", str(folder / "plan.json")],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._scratch.__exit__(None, None, None)

    def turn(self, seed: int) -> TurnFigures:
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: answer() raises
            self._process.stdin.write(f"{seed}\n".encode())
            self._process.stdin.flush()
        figures = self.answer()
        self.pause()
        return figures

    def pause(self) -> None:
        """Stop the processes: an idle worker polls its queue, on the CPU core that another engine needs."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def answer(self) -> TurnFigures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)  # its log ends after its answers
            why = cause(self._log.read_text(errors="replace"))
            raise KvtuneError(
                f"{self._case.name}, {self._side.name}: {why or 'its engine ended'}",
                "run this side alone to see why: its command stands beside the figure",
            )
        figures: TurnFigures = msgspec.json.decode(line)
        return figures
