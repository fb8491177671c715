"""What kvtune and VLLM_GC_DEBUG report as a collection's pause, beside an outside clock, on one planted heap.

    python tests/tools/bench/pause.py

The truth is the time of `gc.collect()` with no instrument installed; turns alternate. Full collections are timed by CPU
time of this thread, VLLM_GC_DEBUG's own included: a busy machine cannot move the ratios. Young ones are too short
for that clock: the wall clock, median of many.
"""

from __future__ import annotations

import gc
import logging
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns, thread_time_ns
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np

from kvtune.probe.gc import CollectorProbe
from kvtune.probe.records import Collection
from kvtune.probe.ring import Ring, read_ring

Clock = Callable[[], int]

HEAP = 1_000_000
YOUNG = 700
"""What a collection of each generation walks: that is when Python starts the youngest, and a heap of a large server."""


class Kvtune:
    name = "kvtune light"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ring"
        self.probe = CollectorProbe(Ring(self.path, 1 << 20))

    def install(self, clock: Clock) -> None:
        self.probe.install()

    def remove(self, clock: Clock) -> float:
        """The last pause in milliseconds."""
        self.probe.remove()
        last = read_ring(self.path).of(Collection)[-1]
        return (last.pause_ns if clock is monotonic_ns else last.cpu_ns) / 1e6


class GcDebug(logging.Handler):
    """vLLM's own debugger, attached as it attaches itself; it says its pauses in the log."""

    name, setting = "VLLM_GC_DEBUG=1", "1"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from vllm.utils import gc_utils

        self.debugger = gc_utils.GCDebugger(gc_utils.GCDebugConfig(self.setting))
        self.module, self.clock, self.said = gc_utils, gc_utils.time, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        match = re.match(r"GC took ([\d.]+)ms", record.getMessage())
        if match:
            self.said = float(match.group(1))

    def install(self, clock: Clock) -> None:
        logger = self.module.logger
        self.before = logger.level, logger.propagate, list(logger.handlers)
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(logging.INFO)
        self.module.time = SimpleNamespace(monotonic_ns=clock)  # type: ignore[assignment]
        gc.callbacks.append(self.debugger.handle)

    def remove(self, clock: Clock) -> float:
        gc.callbacks.remove(self.debugger.handle)
        self.module.time = self.clock
        logger = self.module.logger
        logger.level, logger.propagate, logger.handlers = self.before
        return self.said


class GcDebugTop(GcDebug):
    name, setting = "VLLM_GC_DEBUG, top_objects 5", '{"top_objects": 5}'


def measured(make: Callable[[Path], Any], generation: int, times: int = 5) -> list[tuple[float, float]]:
    """(reported, true) milliseconds, in turns."""
    collected = []
    clock: Clock = thread_time_ns if generation == 2 else monotonic_ns
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    heap = [[i] for i in range(HEAP)] if generation == 2 else []
    gc.collect()
    try:
        with tempfile.TemporaryDirectory() as folder:
            instrument = make(Path(folder))
            for _ in range(times):
                young = [[i] for i in range(YOUNG)]
                start = clock()
                gc.collect(generation)
                true_ms = (clock() - start) / 1e6
                gc.collect(1 if generation == 0 else 2)
                young = [[i] for i in range(YOUNG)]
                instrument.install(clock)
                gc.collect(generation)
                collected.append((instrument.remove(clock), true_ms))
                del young
    finally:
        del heap
        if was_enabled:
            gc.enable()
    return collected


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}, medians of turns\n")
    print("| instrument | collection | reported (ms) | true (ms) | ratio |\n|---|---|---|---|---|")
    for generation, what in ((0, f"generation 0, {YOUNG} objects"), (2, f"full, {HEAP:,} objects")):
        for make in (Kvtune, GcDebug, GcDebugTop):
            try:
                reported, true = np.median(measured(make, generation, 7 if generation else 201), axis=0)
            except ImportError as error:
                print(f"| {make.name} | not installed: {error.name} | | | |")
                continue
            print(
                f"| {make.name} | {what} | {reported:.4g} | {true:.4g} | {reported / true:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
