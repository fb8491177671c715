"""Clocks that tests hand over, so that nobody waits. `python -m tests.clocks ..` is kvtune, twenty times as fast."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from kvtune.base.clock import Clock
from kvtune.cli.app import run
from tests.simulator import SharedLab

FASTER = 20


class Skipping(Clock):
    """Goes on by what is slept, and by nothing else."""

    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> float:
        return self.passed

    def sleep(self, seconds: float) -> None:
        self.passed += seconds


class Hurried(Clock):
    """Waits, for signals and the like to come in between."""

    def now(self) -> float:
        return FASTER * time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / FASTER)


class Timed(SharedLab):
    def __init__(self, clock: Callable[[], Clock]) -> None:
        self.clock = clock


SKIPPING = Timed(Skipping)

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], Timed(Hurried)))
