"""The phase of a profiled run: one byte that the host process writes and the probes in all processes read.

The byte is memory-mapped: reading it in a collector callback costs nanoseconds and no system call.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

STARTING, MEASURING, CULPRITS, OVER = range(4)
"""Start-up and warm-up; the timed pass; a second pass for instruments that distort times; the end."""

FILE = "phase.bin"


class Phase:
    """The phase in a mapped file. The first process creates the file; every process of the run maps it."""

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
            self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)

    @property
    def now(self) -> int:
        return self._page[0]

    def enter(self, phase: int) -> None:
        self._page[0] = phase
