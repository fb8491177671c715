"""Python's garbage collector, measured from inside: one Collection record per collection, in any thread and process."""

from __future__ import annotations

import gc
import sys
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns, thread_time_ns
from typing import Any, Protocol

from kvtune.probe.records import Collection
from kvtune.probe.ring import Ring

TRIGGERS = 1000
"""Lines that are told apart; collections triggered by later ones have no line."""


class CollectionListener(Protocol):
    """An instrument that works at collections, outside the measured pause. One that raises is dropped."""

    name: str

    def before(self, generation: int) -> None: ...
    def after(self, generation: int) -> None: ...


class CollectorProbe:
    """Hooks `gc.callbacks`. Never raises: the first failure removes it and leaves its reason in `failed`."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._started: dict[
            int, tuple[int, int, int, int]
        ] = {}  # by thread: collections may not nest, threads may race
        # An instruction's number is looked up at each collection, so by what is cheap to hash; `_codes` keeps the
        # code objects alive, or their addresses would come back for others.
        self._numbers: dict[tuple[int, int], int] = {}
        self._lines: dict[tuple[str, int], int] = {}
        self._codes: list[Any] = []
        self.counted = 0
        """Objects that were young at the collections so far: with gc.get_count() the net number ever made."""
        self.failed = ""
        self.failed_listeners: dict[str, str] = {}
        self.listeners: list[CollectionListener] = []

    def install(self) -> None:
        gc.callbacks.append(self._call)

    def remove(self) -> None:
        if self._call in gc.callbacks:
            gc.callbacks.remove(self._call)

    def triggers(self) -> list[list[Any]]:
        """File and line by number, as v7 counts them."""
        return [[file, line] for file, line in list(self._lines)]

    def _call(self, phase: str, info: dict[str, Any]) -> None:
        try:
            thread = get_ident()
            if phase == "start":
                if self.listeners:
                    self._tell("before", info["generation"])
                line = self._line()
                # The clocks are read last here and first below, so that the probe's own work is not in the pause.
                young = gc.get_count()[0]
                self.counted += young
                self._started[thread] = (young, line, thread_time_ns(), monotonic_ns())
                return
            end = monotonic_ns()
            cpu = thread_time_ns()
            begun = self._started.pop(thread, None)
            if begun is None:  # installed within a collection
                return
            young, line, cpu_start, start = begun
            generation, collected, uncollectable = (
                int(info[key]) for key in ("generation", "collected", "uncollectable")
            )
            pause, cpu = end - start, cpu - cpu_start
            self._ring.write(
                Collection(generation, start, pause, cpu, collected, uncollectable, thread, young, line)
            )
            if self.listeners:
                self._tell("after", info["generation"])
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            self.remove()

    def _line(self) -> int:
        """The number of the line that made the collection due; bounded, -1 for what is beyond or without a frame."""
        try:
            frame = sys._getframe(2)
        except ValueError:
            return -1
        key = (id(frame.f_code), frame.f_lasti)
        found = self._numbers.get(key)
        return self._numbered(frame, key) if found is None else found

    def _numbered(self, frame: Any, key: tuple[int, int]) -> int:
        """A number for an instruction that triggers for the first time: that of its line."""
        if len(self._numbers) >= 4 * TRIGGERS:
            return -1
        self._codes.append(frame.f_code)
        line = (frame.f_code.co_filename, frame.f_lineno)
        found = self._lines.get(line, -1)
        if found < 0 and len(self._lines) < TRIGGERS:
            found = self._lines[line] = len(self._lines)
        self._numbers[key] = found
        return found

    def _tell(self, moment: str, generation: int) -> None:
        for listener in tuple(self.listeners):
            try:
                act: Callable[[int], None] = getattr(listener, moment)
                act(generation)
            except Exception as error:
                self.listeners.remove(listener)
                self.failed_listeners[listener.name] = f"{type(error).__name__}: {error}"


def collector_kind() -> str:
    """`generational`, or `incremental` where survivors of a young collection do not move up one generation.

    Told by what the interpreter does: incremental collectors came and went within minor versions. Its young list
    is not what was allocated since the last collection, so a census of it would mislead.
    """
    kept: list[object] = []
    gc.collect(0)
    moved_up = any(each is kept for each in gc.get_objects(generation=1))
    return "generational" if moved_up else "incremental"
