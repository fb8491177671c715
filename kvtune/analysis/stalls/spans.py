"""Time that spans cover, as a function of time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
        found: Seconds = np.interp(end_s, self.at_s, self.so_far_s) - np.interp(
            begin_s, self.at_s, self.so_far_s
        )
        return np.maximum(found, 0.0)


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
