"""Virtual time of a replay. Runs in the simulator's process.

The clock advances when EngineCore waits for a step's output. kvtune's core reads it through
`kvtune.plugin.core.state.clock`, so eviction policies measure a block's age in seconds of the workload.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class VirtualClock:
    """`now_s`: seconds since the workload's start; never decreases. `device_free_s`: when the last queued step ends."""

    __slots__ = ("device_free_s", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.device_free_s = 0.0

    def advance_to(self, time_s: float) -> None:
        if time_s > self.now_s:
            self.now_s = time_s

    def run(self, cost_s: float) -> float:
        """Queue a step of `cost_s` seconds after the steps already sent; return when the new step ends."""
        start = self.device_free_s if self.device_free_s > self.now_s else self.now_s
        self.device_free_s = start + cost_s
        return self.device_free_s

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def policies_see(clock: VirtualClock) -> Iterator[None]:
    """Make kvtune's core measure the age of blocks by `clock`, not the machine's clock, inside this context."""
    from kvtune.plugin.core import state

    books = state.books()
    before, books.clock = books.clock, clock
    try:
        yield
    finally:
        books.clock = before
