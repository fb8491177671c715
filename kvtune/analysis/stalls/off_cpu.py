"""When a process had no CPU: it waited for one in the machine's run queue, or a signal had stopped it. Pure.

Waits are sampled a few times a second. Between two samples, the length of a wait is exact, but not when it was. So it
is spread evenly over all unexplained time between the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.stalls.spans import Covered, Seconds
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class CpuWaits:
    """One process: its total wait so far at each sample, and the times of samples that found it stopped."""

    process: int
    at_s: Seconds
    wait_s: Seconds
    stopped_s: Seconds

    def around(self, begin_s: Seconds, end_s: Seconds) -> tuple[Seconds, Seconds, Seconds]:
        """Return, for each span, the times of the last sample before and the first after it, and the wait between."""
        if not len(self.at_s):
            return begin_s, end_s, np.zeros(len(begin_s))
        first = np.maximum(np.searchsorted(self.at_s, begin_s, side="right") - 1, 0)
        last = np.minimum(np.searchsorted(self.at_s, end_s, side="left"), len(self.at_s) - 1)
        return (
            np.minimum(self.at_s[first], begin_s),
            np.maximum(self.at_s[last], end_s),
            np.maximum(self.wait_s[last] - self.wait_s[first], 0.0),
        )

    def only_stops(self) -> CpuWaits:
        """Return the stops without the waits, which may be those of a thread that sends no tokens."""
        return CpuWaits(self.process, np.empty(0), np.empty(0), self.stopped_s)

    def stopped_in(self, begin_s: Seconds, end_s: Seconds) -> NDArray[np.bool_]:
        """Return whether a sample within each span found the process stopped."""
        before = np.searchsorted(self.stopped_s, begin_s, side="right")
        return np.asarray(np.searchsorted(self.stopped_s, end_s, side="left") > before)


def cpu_waits(run: Run, *roles: str) -> list[CpuWaits]:
    """Return the waits of the processes with these roles."""
    memory = run.table("memory")
    found = []
    for index, process in enumerate(run.header.processes):
        if process.role in roles:
            own = np.flatnonzero(memory["process"] == index)
            own = own[np.argsort(memory["t_s"][own], kind="stable")]
            known = own[np.isfinite(memory["wait_s"][own])]
            stopped = own[memory["stopped"][own] > 0]
            found.append(
                CpuWaits(index, memory["t_s"][known], memory["wait_s"][known], memory["t_s"][stopped])
            )
    return found


@dataclass(frozen=True, slots=True)
class OffCpu:
    """For each span: the share of its unexplained time without a CPU, the process, and whether one was stopped."""

    share: Seconds
    process: NDArray[np.int64]
    stopped: NDArray[np.bool_]


def off_cpu(
    waits: Sequence[CpuWaits], begin_s: Seconds, end_s: Seconds, unexplained: Covered, least_s: Seconds
) -> OffCpu:
    """Return the share of each span without a CPU. If several processes waited, the one that waited longest counts.

    `unexplained`: the unexplained time of all spans. `least_s`: each span's own, as a lower bound for it.
    """
    share = np.zeros(len(begin_s))
    process = np.full(len(begin_s), -1, np.int64)
    stopped = np.zeros(len(begin_s), np.bool_)
    for own in waits:
        from_s, to_s, wait_s = own.around(begin_s, end_s)
        all_s = np.maximum(unexplained.within(from_s, to_s), least_s)
        part = np.minimum(wait_s / np.maximum(all_s, 1e-12), 1.0)
        halted = own.stopped_in(begin_s, end_s)
        part[halted] = 2.0  # more than any wait's share
        more = part > share
        share[more], process[more] = part[more], own.process
        stopped |= halted
    return OffCpu(np.minimum(share, 1.0), process, stopped)
