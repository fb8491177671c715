"""Finds the lines of code that make the objects that cause collections. Level `sites`, any engine process.

A sample lasts from one collection to the next: tracemalloc (one frame) is on in between, and at the second collection
each young object is counted by type and line. A budget of CPU time limits how many samples are taken.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import process_time_ns
from tracemalloc import Traceback

from kvtune.plugin.probe.objects.tally import Tally, save
from kvtune.plugin.probe.phase import CULPRITS, Phase

BUDGET = 0.08
"""Share of the process's CPU time that may pass with tracemalloc on, including its own cost and the counting."""
LONGEST_NS = 150_000_000
"""CPU time after which a sample is dropped if its second collection has not come."""
FIRST = 4
"""Samples that are taken before the budget applies, so that short passes have some."""

_MANAGED_DICT = 1 << 4
_LIST_ITEMS = 24  # offset of the address of a list's items
_pointer = ctypes.c_void_p.from_address
_WRONG_ADDRESS = sys.version_info[:2] == (3, 11)
_PRE_HEADER = 32  # the collector's header and the two words before it, on 3.11


Frames = Traceback | tuple[tuple[str, int], ...]
"""tracemalloc's own object, or the plain tuples that its C function returns."""


def site_reader() -> Callable[[object], tuple[str, int]]:
    """Return a function that maps an object to the file and line that allocated it, or ("", 0) if unknown."""
    read: Callable[[object], Frames | None] = getattr(
        tracemalloc, "_get_object_traceback", tracemalloc.get_object_traceback
    )
    address_of = _address_reader()

    def site(tracked: object) -> tuple[str, int]:
        frames = read(tracked)
        if frames is None and address_of is not None:
            if type(tracked) is list:  # it came from the free list, but its items were allocated
                frames = address_of(0, _pointer(id(tracked) + _LIST_ITEMS).value or 0) if tracked else None
            elif _WRONG_ADDRESS and type(tracked).__flags__ & _MANAGED_DICT:
                frames = address_of(0, id(tracked) - _PRE_HEADER)
        if not frames:
            return "", 0
        first = frames[0]
        if isinstance(first, tuple):
            return str(first[0]), int(first[1])
        return str(first.filename), int(first.lineno)

    return site


def _address_reader() -> Callable[[int, int], Frames | None] | None:
    """Return tracemalloc's function that reads the trace of an address; None if this Python lacks it."""
    try:
        function = ctypes.pythonapi._PyTraceMalloc_GetTraceback
    except AttributeError:
        return None
    function.argtypes = (ctypes.c_uint, ctypes.c_size_t)
    function.restype = ctypes.py_object
    return function


class Sites:
    """Listens to the collector probe and samples in the second pass. Takes no samples if others use tracemalloc."""

    name = "sites"

    def __init__(self, folder: Path, phase: Phase, *, budget: float = BUDGET) -> None:
        self._folder, self._phase, self._budget = folder, phase, budget
        self._tally = Tally()
        self._site = site_reader()
        self._dice = Random(0)  # random gaps, so that samples do not follow the engine's own rhythm
        self.of_steps: Callable[[], dict[str, object]] | None = None
        self._collections = self._samples = self._skip = 0
        self._first_ns = self._spent_ns = self._traced_since_ns = 0

    def before(self, generation: int) -> None:
        tracing = self._traced_since_ns != 0
        if self._phase.now != CULPRITS:
            if tracing:
                self._stop()
            return
        self._collections += 1
        if tracing:
            self._samples += 1
            self._tally.add_made(gc.get_objects(generation=0), self._site)
            self._stop()

    def after(self, generation: int) -> None:
        if self._phase.now != CULPRITS or self._traced_since_ns or not gc.isenabled():
            return
        now_ns = process_time_ns()
        if not self._first_ns:
            self._first_ns = now_ns
        if self._samples >= FIRST and self._spent_ns > self._budget * (now_ns - self._first_ns):
            self._skip = self._dice.randrange(8)
            return
        if self._skip:
            self._skip -= 1
            return
        self._skip = self._dice.randrange(8)
        if not tracemalloc.is_tracing():
            self._traced_since_ns = now_ns
            tracemalloc.start(1)

    def expire(self) -> None:
        """Drop a sample whose second collection does not come: small batches may decode without any collection."""
        since = self._traced_since_ns
        if since and process_time_ns() - since > LONGEST_NS:
            self._stop()

    def _stop(self) -> None:
        since, self._traced_since_ns = self._traced_since_ns, 0
        if since:
            tracemalloc.stop()
            self._spent_ns += process_time_ns() - since

    def save(self) -> None:
        save(self._folder, self.name, self.facts())

    def facts(self) -> dict[str, object]:
        spent = max(1, process_time_ns() - self._first_ns) if self._first_ns else 1
        return {
            "collections": self._collections,
            "samples": self._samples,
            "traced_share": self._spent_ns / spent,
            "rows": self._tally.top(),
            **({"of_steps": self.of_steps()} if self.of_steps is not None else {}),
        }
