"""Python's collector, as seen from inside: one COLLECTION record per collection, in any thread of any process.

Fields: v0 start ns (monotonic), v1 pause ns, v2 thread CPU ns within the pause, v3 collected, v4 uncollectable,
v5 thread id, v6 young-generation count when it started.
"""

from __future__ import annotations

import gc
import threading
from time import monotonic_ns, thread_time_ns
from typing import Any

from kvtune.probe.ring import COLLECTION, Ring


class CollectorProbe:
    """Hooks `gc.callbacks`. Never raises: the first failure removes it and leaves its reason in `failed`."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._started: dict[
            int, tuple[int, int, int]
        ] = {}  # by thread: collections may not nest, threads may race
        self.failed = ""

    def install(self) -> None:
        gc.callbacks.append(self._call)

    def remove(self) -> None:
        if self._call in gc.callbacks:
            gc.callbacks.remove(self._call)

    def _call(self, phase: str, info: dict[str, Any]) -> None:
        try:
            thread = threading.get_ident()
            if phase == "start":
                # The clocks are read last here and first below, so that the probe's own work is not in the pause.
                young = gc.get_count()[0]
                self._started[thread] = (young, thread_time_ns(), monotonic_ns())
                return
            end = monotonic_ns()
            cpu = thread_time_ns()
            begun = self._started.pop(thread, None)
            if begun is None:  # installed within a collection
                return
            young, cpu_start, start = begun
            self._ring.write(
                COLLECTION,
                int(info["generation"]),
                0,
                (
                    start,
                    end - start,
                    cpu - cpu_start,
                    int(info["collected"]),
                    int(info["uncollectable"]),
                    thread,
                    young,
                    0,
                    0,
                    0,
                ),
            )
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            self.remove()
