"""How many objects the collector watches in this process: when measuring begins, and after each full collection.

Counting them makes a list of all: milliseconds, beside a full collection's tens or hundreds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import monotonic

from kvtune.probe.phase import MEASURING, Phase

TELL_EVERY_S = 1.0


class Heap:
    """A listener of the collector's probe; also the moment at which a process without steps renews its status."""

    name = "heap"

    def __init__(self, phase: Phase, tell: Callable[[], None]) -> None:
        self._phase, self._tell = phase, tell
        self._told = 0.0
        self.objects: dict[str, int] = {}

    def before(self, generation: int) -> None:
        if "start" not in self.objects and self._phase.now == MEASURING:
            self.objects["start"] = self.objects["last"] = len(gc.get_objects())

    def after(self, generation: int) -> None:
        if generation == 2 and self._phase.now == MEASURING:
            self.objects["last"] = len(gc.get_objects())
        now = monotonic()
        if now - self._told > TELL_EVERY_S:
            self._told = now
            self._tell()
