"""Virtual time of a replay. Runs in the simulator's process.

It moves when EngineCore waits for a step's output. kvtune's core reads it through `kvtune.core.state.clock`, so that
policies that age blocks in seconds see the workload's seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class VirtualClock:
    """Seconds since the workload's start; never goes back. `device_free_s`: when the last queued step will be done."""

    __slots__ = ("device_free_s", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.device_free_s = 0.0

    def advance_to(self, time_s: float) -> None:
        if time_s > self.now_s:
            self.now_s = time_s

    def run(self, cost_s: float) -> float:
        """Queue a step of this length after those already sent, and return when it will be done."""
        start = self.device_free_s if self.device_free_s > self.now_s else self.now_s
        self.device_free_s = start + cost_s
        return self.device_free_s

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def policies_see(clock: VirtualClock) -> Iterator[None]:
    """Within this context, kvtune's core ages blocks by `clock` instead of the machine's."""
    from kvtune.core import state

    before = state.clock
    state.clock = clock
    try:
        yield
    finally:
        state.clock = before
