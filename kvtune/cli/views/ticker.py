"""Prints a line of progress every ten seconds if standard error is not a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

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
