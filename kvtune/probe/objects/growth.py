"""Finds which objects a process holds more of after the measuring phase, by type and line. Level `full`.

tracemalloc runs throughout, and the whole heap is counted twice: the times of such a run mean nothing.
"""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from sys import getsizeof

from kvtune.probe.objects.sites import own_folder, site_reader
from kvtune.probe.objects.tally import LIMIT, Tally, save, type_name


class Growth:
    """`first()` when measuring begins, `second()` when it is over."""

    name = "growth"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: Tally | None = None
        self._traced_before = 0
        if not tracemalloc.is_tracing():
            tracemalloc.start(1)

    def first(self) -> None:
        self._before = heap()
        self._traced_before = tracemalloc.get_traced_memory()[0]

    def second(self) -> None:
        if self._before is None:
            return
        now, before = heap(), self._before.rows
        grown = Tally(2 * LIMIT)
        for key, (n, size) in now.rows.items():
            n_before, size_before = before.get(key, (0, 0))
            if n > n_before:
                grown.add(key, n - n_before, size - size_before)
        facts = {
            "traced_bytes": tracemalloc.get_traced_memory()[0] - self._traced_before,
            "rows": grown.top(),
        }
        save(self._folder, self.name, facts)


def heap() -> Tally:
    """All objects that the collector tracks and has not frozen, by type and line, except the instruments' own."""
    site, folder, tally = site_reader(), own_folder(), Tally(2 * LIMIT)
    gc.collect()  # garbage is not growth
    for each in gc.get_objects():
        file, line = site(each)
        if file.startswith(folder):
            continue
        tally.add((type_name(type(each)), file, line), 1, getsizeof(each))
    return tally
