"""Gaps between the deliveries of a request's tokens, and the step that made each token. Pure.

A delivery can hold several tokens, if the front end is late; a gap is the time between two deliveries. The step of a
token is known by the time at which EngineCore made it. In files without that time, the latest possible step counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.stalls.spans import Seconds
from kvtune.run.types import Run

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
