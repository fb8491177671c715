"""Counts the objects of the young generation by type, at every k-th collection. Level `types`, any engine process.

A census is taken in the collector's start callback before the clocks are read, so it is not part of the pause; the
step in which it happens takes longer.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from sys import getsizeof
from time import process_time_ns

from kvtune.plugin.probe.objects.tally import Tally, save, type_name
from kvtune.plugin.probe.phase import MEASURING, Phase

EVERY = 16
SIZED = 64
"""How many objects of each type are measured per census; the others count with the mean size of these."""


class Census:
    """Listens to the collector probe and counts young objects by type, in the measuring phase only."""

    name = "types"

    def __init__(self, folder: Path, phase: Phase, every: int = EVERY) -> None:
        self._folder, self._phase, self._every = folder, phase, every
        self._tally = Tally()
        self._collections = self._samples = self._young = self._cost_ns = 0

    def before(self, generation: int) -> None:
        if self._phase.now != MEASURING:
            return
        self._collections += 1
        if self._collections % self._every:
            return
        start = process_time_ns()
        young = gc.get_objects(generation=0)
        counts = Counter(map(type, young))
        self._samples += 1
        self._young += len(young)
        sizes: dict[type, list[int]] = {}
        for kind in counts:
            sizes[kind] = [0, 0]
        for each in young:
            measured = sizes[type(each)]
            if measured[0] < SIZED:
                measured[0] += 1
                measured[1] += getsizeof(each)
        for kind, n in counts.items():
            sized, total = sizes[kind]
            self._tally.add((type_name(kind), "", 0), n, total * n // max(1, sized))
        self._cost_ns += process_time_ns() - start

    def after(self, generation: int) -> None: ...

    def expire(self) -> None:
        """Do nothing: a census is over at once."""

    def save(self) -> None:
        save(self._folder, self.name, self.facts())

    def facts(self) -> dict[str, object]:
        return {
            "collections": self._collections,
            "samples": self._samples,
            "young": self._young,
            "cost_us": self._cost_ns / 1e3,
            "rows": self._tally.top(),
        }
