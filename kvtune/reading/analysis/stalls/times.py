"""Times that an account of slow tokens needs: what spans cover, gaps between tokens, waits for a CPU. Pure.

Gaps: a delivery can hold several tokens, if the front end is late; a gap is the time between two deliveries of a
request's tokens. The step of a token is known by the time at which EngineCore made it. In files without that time, the
latest possible step counts.

Waits: a process had no CPU if it waited for one in the machine's run queue, or a signal had stopped it. Waits are
sampled a few times a second. Between two samples, the length of a wait is exact, but not when it was. So it is spread
evenly over all unexplained time between the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.types import Run

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Covered:
    """Covered time so far: rises within spans, constant between them. Where spans overlap, time counts once."""

    at_s: Seconds
    so_far_s: Seconds

    def within(self, begin_s: Seconds, end_s: Seconds) -> Seconds:
        """Return the covered time in each [begin, end]."""
        if not len(self.at_s):
            return np.zeros(len(begin_s))
        seconds: Seconds = np.interp(end_s, self.at_s, self.so_far_s) - np.interp(
            begin_s, self.at_s, self.so_far_s
        )
        return np.maximum(seconds, 0.0)


def covered(start_s: Seconds, length_s: Seconds) -> Covered:
    """Return the covered time of spans in any order; lengths that are NaN count as 0."""
    order = np.argsort(start_s, kind="stable")
    start, end = start_s[order], (start_s + np.nan_to_num(length_s))[order]
    if not len(start):
        return Covered(np.empty(0), np.empty(0))
    reached = np.maximum.accumulate(end)
    start = np.maximum(start, np.concatenate(([-np.inf], reached[:-1])))
    length = np.maximum(end - start, 0.0)
    before = np.cumsum(length) - length
    return Covered(
        np.column_stack((start, start + length)).ravel(), np.column_stack((before, before + length)).ravel()
    )


Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Gaps:
    """`before` and `made`: the steps of the last token before the gap and of the first one after it; -1: not known."""

    request: Rows
    begin_s: Seconds
    end_s: Seconds
    before: Rows
    made: Rows

    @property
    def known(self) -> NDArray[np.bool_]:
        return np.asarray((self.before >= 0) & (self.made > self.before))

    def of(self, rows: Rows) -> Gaps:
        return Gaps(
            self.request[rows], self.begin_s[rows], self.end_s[rows], self.before[rows], self.made[rows]
        )


def token_gaps(run: Run, step_start_s: Seconds, step_end_s: Seconds) -> Gaps:
    """Return all gaps of a run, by request and time. The arguments are the steps that made tokens, ordered by time."""
    tokens = run.table("tokens")
    order = np.lexsort((tokens["t_s"], tokens["request"]))
    request = tokens["request"][order].astype(np.int64)
    t_s, count = tokens["t_s"][order], np.maximum(tokens["count"][order], 1).astype(np.int64)
    made_s = tokens["made_s"][order] if "made_s" in tokens else np.full(len(t_s), np.nan)
    last = np.where(
        np.isfinite(made_s),
        np.searchsorted(step_start_s, made_s, side="right") - 1,
        steps_of(t_s, count, request, step_end_s),
    )
    follows = request[1:] == request[:-1]
    return Gaps(
        request[1:][follows],
        t_s[:-1][follows],
        t_s[1:][follows],
        last[:-1][follows],
        np.where(last[1:] >= 0, last[1:] - count[1:] + 1, -1)[follows],
    )


def steps_of(t_s: Seconds, count: Rows, group: Rows, step_end_s: Seconds) -> Rows:
    """Return the step that made the last token of each delivery; -1 if none had ended.

    This is the latest possible step: one that had ended by then, with another step for each later token. So a late
    delivery does not count as a late step. `group` ascends, and so does `t_s` within a group.
    """
    ended = np.searchsorted(step_end_s, t_s, side="right").astype(np.int64) - 1
    if not len(ended):
        return ended
    so_far = _count_so_far(count, group)
    # The running minimum of (ended - tokens so far), from the end of each group backwards. An offset larger than any
    # such difference keeps groups apart.
    apart = group * (int(so_far.max()) + len(step_end_s) + 2)
    least = np.minimum.accumulate((ended - so_far + apart)[::-1])[::-1] - apart
    return np.asarray(np.maximum(least + so_far, -1))


def _count_so_far(count: Rows, group: Rows) -> Rows:
    total = np.cumsum(count)
    first = np.concatenate(([True], group[1:] != group[:-1]))
    before = np.where(first, total - count, 0)
    return np.asarray(total - np.maximum.accumulate(before))


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
    waits = []
    for index, process in enumerate(run.header.processes):
        if process.role in roles:
            own = np.flatnonzero(memory["process"] == index)
            own = own[np.argsort(memory["t_s"][own], kind="stable")]
            measured = own[np.isfinite(memory["wait_s"][own])]
            stopped = own[memory["stopped"][own] > 0]
            waits.append(
                CpuWaits(index, memory["t_s"][measured], memory["wait_s"][measured], memory["t_s"][stopped])
            )
    return waits


@dataclass(frozen=True, slots=True)
class OffCpu:
    """The share of each span's unexplained time without a CPU, the process, and whether one was stopped."""

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
