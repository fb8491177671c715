"""A line of progress every ten seconds where there is no terminal to draw on, also while nothing happens."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

EVERY_S = 10.0


class Ticker:
    """`line` gives the text, printed when nothing else was for ten seconds. Call `said` after printing anything."""

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
