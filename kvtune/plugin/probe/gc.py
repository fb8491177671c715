"""Measures Python's garbage collector: one Collection record per collection, in any thread and process."""

from __future__ import annotations

import gc
import sys
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns, thread_time_ns
from types import CodeType, FrameType
from typing import Protocol

from kvtune.plugin.probe.phase import MEASURING, Phase
from kvtune.plugin.probe.records import Collection
from kvtune.plugin.probe.ring import Ring

TRIGGERS = 1000
"""The most lines that get a number. Collections triggered by further lines are recorded without a line."""


class CollectionListener(Protocol):
    """An instrument called before and after each collection, outside the measured pause. One that raises is removed."""

    name: str

    def before(self, generation: int) -> None: ...
    def after(self, generation: int) -> None: ...


class CollectorProbe:
    """A `gc.callbacks` hook. Never raises: at its first failure it removes itself and keeps the reason in `failed`."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._started: dict[
            int, tuple[int, int, int, int]
        ] = {}  # by thread: several threads may be in a collection
        # Line numbers by (id of the code object, instruction): cheap to hash at each collection. `_codes` keeps the
        # code objects alive, because the id of a freed one is given to another.
        self._numbers: dict[tuple[int, int], int] = {}
        self._lines: dict[tuple[str, int], int] = {}
        self._codes: list[CodeType] = []
        self.counted = 0
        """Sum of young objects at all collections so far. Plus gc.get_count()[0]: objects made minus objects freed."""
        self.paused_ns: dict[int, int] = {}
        """Sum of all pauses so far, by the thread that collected."""
        self.failed = ""
        self.failed_listeners: dict[str, str] = {}
        self.listeners: list[CollectionListener] = []

    def install(self) -> None:
        gc.callbacks.append(self._call)

    def remove(self) -> None:
        if self._call in gc.callbacks:
            gc.callbacks.remove(self._call)

    def triggers(self) -> list[tuple[str, int]]:
        """Return the file and line of each trigger; `Collection.line` is an index into this list."""
        return list(self._lines)

    def _call(self, phase: str, info: dict[str, int]) -> None:
        try:
            thread = get_ident()
            if phase == "start":
                if self.listeners:
                    self._notify("before", info["generation"])
                line = self._line()
                # The clocks are read last here and first below, so that the probe's own work is not in the pause.
                young = gc.get_count()[0]
                self.counted += young
                self._started[thread] = (young, line, thread_time_ns(), monotonic_ns())
                return
            end = monotonic_ns()
            cpu = thread_time_ns()
            started = self._started.pop(thread, None)
            if started is None:  # the hook was installed during this collection
                return
            young, line, cpu_start, start = started
            generation, collected, uncollectable = (
                int(info[key]) for key in ("generation", "collected", "uncollectable")
            )
            pause, cpu = end - start, cpu - cpu_start
            self.paused_ns[thread] = self.paused_ns.get(thread, 0) + pause
            self._ring.write(
                Collection(generation, start, pause, cpu, collected, uncollectable, thread, young, line)
            )
            if self.listeners:
                self._notify("after", info["generation"])
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            self.remove()

    def _line(self) -> int:
        """Return the number of the line that triggered the collection; -1 without a frame or after TRIGGERS lines."""
        try:
            frame = sys._getframe(2)
        except ValueError:
            return -1
        key = (id(frame.f_code), frame.f_lasti)
        number = self._numbers.get(key)
        return self._numbered(frame, key) if number is None else number

    def _numbered(self, frame: FrameType, key: tuple[int, int]) -> int:
        """Return a line number for an instruction that triggers a collection for the first time."""
        if len(self._numbers) >= 4 * TRIGGERS:
            return -1
        self._codes.append(frame.f_code)
        line = (frame.f_code.co_filename, frame.f_lineno)
        number = self._lines.get(line, -1)
        if number < 0 and len(self._lines) < TRIGGERS:
            number = self._lines[line] = len(self._lines)
        self._numbers[key] = number
        return number

    def _notify(self, moment: str, generation: int) -> None:
        for listener in tuple(self.listeners):
            try:
                callback: Callable[[int], None] = getattr(listener, moment)
                callback(generation)
            except Exception as error:
                self.listeners.remove(listener)
                self.failed_listeners[listener.name] = f"{type(error).__name__}: {error}"


def collector_kind() -> str:
    """Return `generational`, or `incremental` if survivors of a young collection do not move up one generation.

    Detected by behaviour, because incremental collectors came and went within minor versions of Python. With one, the
    young list is not the list of objects allocated since the last collection, so a census of it would mislead.
    """
    kept: list[object] = []
    gc.collect(0)
    moved_up = any(each is kept for each in gc.get_objects(generation=1))
    return "generational" if moved_up else "incremental"


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
