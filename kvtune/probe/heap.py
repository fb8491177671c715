"""Counts the objects that the collector tracks, at the first collection while measuring and after each full one.

Counting builds a list of all of them. This takes milliseconds; a full collection takes tens or hundreds.
"""

from __future__ import annotations

import gc

from kvtune.probe.phase import MEASURING, Phase


class Heap:
    """Listens to the collector probe and counts the tracked objects."""

    name = "heap"

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self.objects: dict[str, int] = {}

    def before(self, generation: int) -> None:
        if "start" not in self.objects and self._phase.now == MEASURING:
            self.objects["start"] = self.objects["last"] = len(gc.get_objects())

    def after(self, generation: int) -> None:
        if generation == 2 and self._phase.now == MEASURING:
            self.objects["last"] = len(gc.get_objects())
