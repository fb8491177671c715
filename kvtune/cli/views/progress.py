"""Live progress of a run on stderr: phases, requests, tokens per second, hits, ETA. Plain lines without a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from kvtune.answers.explain.explanation import View
from kvtune.data.show.terminal import console
from kvtune.lab.engine.messages import Event

if TYPE_CHECKING:
    from kvtune.lab.sim.worker import Report


PHASES = {
    "starting": "starting engine",
    "warm-up": "warming up",
    "measuring": "measuring",
    "finishing": "stopping engine",
    "replaying": "replaying",
    "culprits": "second pass: where objects are made",
    "over": "stopping engine",
    "analysing": "analysing",
}


class ProgressView:
    """Shows the progress of one run. Call it with each event of the engine's host process."""

    def __init__(self, total: int, label: str) -> None:
        self._total = total
        self._label = label
        self._console = console(stderr=True)
        self._plain = not self._console.is_terminal
        self._phase = ""
        self._measuring_since = 0.0
        self._last = ""
        self._phase_since = monotonic()
        self._ticker = Ticker(self._still)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._shown: Ticker | Progress = self._ticker if self._plain else self._bar
        self._task = self._bar.add_task(label, total=total, detail="")

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        if event.kind == "phase":
            self.phase(event.name)
        elif event.kind == "progress" and self._phase == "measuring":
            self._progress(event)

    def phase(self, name: str) -> None:
        if name == self._phase:
            return
        self._phase, self._phase_since, self._last = name, monotonic(), ""
        text = f"{self._label}: {PHASES.get(name, name)}"
        if name == "measuring":
            self._measuring_since = monotonic()
        if self._plain:
            self._ticker.said()
            print(
                f"{text} ({self._total} requests)" if name == "measuring" else text,
                file=sys.stderr,
                flush=True,
            )
        else:
            self._bar.update(self._task, description=text, detail="")  # clears the previous phase's detail

    def replayed(self, report: Report) -> None:
        """Show the progress of a simulated run."""
        if not report.finished:
            return
        left_s = report.elapsed_s * (report.requests / report.finished - 1)
        self._show(report.finished, f"ETA {left_s:.0f} s")

    def _progress(self, event: Event) -> None:
        elapsed = max(monotonic() - self._measuring_since, 1e-6)
        detail = f"{event.output_tokens / elapsed:,.0f} tok/s"
        if event.rate is not None:
            detail += f"  hits {100 * event.rate:.0f} %"
        if event.finished:
            detail += f"  ETA {elapsed / event.finished * (self._total - event.finished):.0f} s"
        self._show(event.finished, detail)

    def _show(self, finished: int, detail: str) -> None:
        if self._plain:
            self._last = f"{finished}/{self._total} requests  {detail}"
        else:
            self._bar.update(self._task, completed=finished, detail=detail)

    def _still(self) -> str:
        """Return a line for output that is no terminal: the phase, its duration so far, its progress."""
        text = (
            f"{self._label}: {PHASES.get(self._phase, self._phase)}, {monotonic() - self._phase_since:.0f} s"
        )
        return f"{text}, {self._last}" if self._last else text


class Replays(View):
    """Shows replays of a measured run in a `ProgressView`."""

    def __init__(self, view: ProgressView) -> None:
        self._view = view

    def phase(self, text: str) -> None:
        self._view.phase(text)

    def progress(self, report: Report) -> None:
        self._view.replayed(report)


EVERY_S = 10.0


class Ticker:
    """Prints the text of `line` when nothing was printed for ten seconds. Call `said` after printing anything else."""

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._every_s = EVERY_S
        self._last = monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtune-ticker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def said(self) -> None:
        self._last = monotonic()

    def _run(self) -> None:
        while not self._stop.wait(max(0.01, self._last + self._every_s - monotonic())):
            if monotonic() - self._last >= self._every_s:
                self.said()
                print(self._line(), file=sys.stderr, flush=True)
