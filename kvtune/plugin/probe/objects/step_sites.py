"""Counts the objects that a step of EngineCore makes, by type and line. Level `sites`, second pass, main loop.

tracemalloc is on for one sampled step. The objects are counted when the model's output has arrived, before the
scheduler's update. With small batches this includes objects that are freed before any collection.
"""

from __future__ import annotations

import gc
import tracemalloc
from random import Random
from time import thread_time_ns

from kvtune.plugin.probe.objects.sites import site_reader
from kvtune.plugin.probe.objects.tally import Tally
from kvtune.plugin.probe.phase import CULPRITS, Phase

BUDGET = 0.08
"""Share of EngineCore's thread time that sampling may add to its steps."""


class StepSites:
    """Samples steps. The step probe calls it when a step begins, when its output has arrived, and when it ends."""

    def __init__(self, phase: Phase, *, budget: float = BUDGET) -> None:
        self._phase, self._budget = phase, budget
        self._site = site_reader()
        self._tally = Tally()
        self._dice = Random(1)
        self._samples = self._skip = self._spent_ns = self._since_ns = self._first_ns = 0

    def begin(self) -> None:
        if self._phase.now != CULPRITS or tracemalloc.is_tracing():
            return
        now = thread_time_ns()
        self._first_ns = self._first_ns or now
        if self._spent_ns > self._budget * (now - self._first_ns):
            self._skip = self._dice.randrange(4)
        elif self._skip:
            self._skip -= 1
        else:
            self._skip = self._dice.randrange(4)
            self._since_ns = now
            tracemalloc.start(1)

    def output_is_in(self) -> None:
        """Count the step's objects in generations 0 and 1; few can have moved to generation 2 within a step."""
        if not self._since_ns or not tracemalloc.is_tracing():
            return
        for generation in (0, 1):
            self._tally.add_made(gc.get_objects(generation=generation), self._site, unknown=False)
        self._samples += 1

    def end(self) -> None:
        if self._since_ns:
            tracemalloc.stop()
            self._spent_ns += thread_time_ns() - self._since_ns
            self._since_ns = 0

    def facts(self) -> dict[str, object]:
        return {"samples": self._samples, "rows": self._tally.top()}
