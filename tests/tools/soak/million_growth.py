"""Whether a process grows with the requests it has served: a census between rounds, and a line through them."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import psutil

from kvtune.analysis.spread import slope_interval

BEGIN_SHARE = 0.3
"""Of a portion's censuses, left out: tables that have an end fill up."""
FEWEST = 8
"""Censuses of which a slope says something."""
MOST_BYTES = 1024.0
"""A request. A slope whose interval is above 0 is still allowed up to this."""
BLOCK_BYTES = 512
"""The largest block that Python's allocator gives out; each object and each block counts as one."""


class Counts(NamedTuple):
    """`objects`: those that the collector tracks. `blocks`: of Python's allocator, untracked objects with them."""

    objects: int
    blocks: int
    rss: int


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth a request, with its 95 % interval. `unit_bytes`: of one of what is counted, at most."""

    name: str
    slope: float
    low: float
    high: float
    unit_bytes: int

    @property
    def flat(self) -> bool:
        return self.low <= 0.0 or self.high * self.unit_bytes < MOST_BYTES

    def __str__(self) -> str:
        return f"{self.name} {self.slope:+.4f} ({self.low:+.4f} to {self.high:+.4f}) a request"


def count() -> Counts:
    """Of this process, now, after a full collection."""
    gc.collect()
    return Counts(len(gc.get_objects()), sys.getallocatedblocks(), psutil.Process().memory_info().rss)


def slopes(requests: list[int], counts: list[Counts]) -> list[Slope]:
    """One of each column of `counts`, by least squares; none of too few censuses."""
    begin = int(len(requests) * BEGIN_SHARE)
    x = np.array(requests[begin:], float)
    if len(x) < FEWEST:
        return []
    found = []
    for at, (name, unit) in enumerate((("objects", BLOCK_BYTES), ("blocks", BLOCK_BYTES), ("rss bytes", 1))):
        y = np.array([each[at] for each in counts[begin:]], float)
        if not np.ptp(y):
            found.append(Slope(name, 0.0, 0.0, 0.0, unit))
            continue
        found.append(Slope(name, *slope_interval(x, y), unit))
    return found
