"""Memory growth of each process: Run -> Trend (slope, interval, verdict); the KV pool's size. Pure.

The slope is fitted to the run's second half: to means of 20 stretches, as neighbouring samples are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.processes import process_keys
from kvtune.analysis.spread import slope_interval
from kvtune.run.types import Run

STRETCHES = 20
SHORTEST_S = 60.0
"""Shorter runs are not judged for leaks: caches and allocators are still filling."""
LEAST_BYTES_H = 64 << 20
"""Bytes an hour. Slower growth is not called a leak."""

Growth = Literal["grows", "no growth shown", "too short to tell"]


@dataclass(frozen=True, slots=True)
class Trend:
    """Growth of RSS, between `low` and `high` with 95 % confidence. `uss_last_bytes` is None if never sampled."""

    slope_bytes_s: float | None
    low_bytes_s: float | None
    high_bytes_s: float | None
    verdict: Growth
    uss_last_bytes: int | None


def trends(run: Run) -> dict[str, Trend]:
    table = run.table("memory")
    by_process = {}
    for index, key in enumerate(process_keys(run)):
        rows = table["process"] == index
        if not rows.any():
            continue
        t_s, rss, uss = table["t_s"][rows], table["rss_bytes"][rows], table["uss_bytes"][rows]
        read = np.flatnonzero(uss)
        slope, low, high = _slope(t_s, rss)
        verdict: Growth = "no growth shown"
        if t_s[-1] - t_s[0] < SHORTEST_S or low is None:
            verdict = "too short to tell"
        elif low * 3600 > LEAST_BYTES_H:
            verdict = "grows"
        by_process[key] = Trend(slope, low, high, verdict, int(uss[read[-1]]) if len(read) else None)
    return by_process


def pool_bytes(run: Run) -> int | None:
    """Return the KV pool's bytes. Groups share tensors: a block is as large as the largest group."""
    groups = run.header.engine.groups
    pages = [int(g.get("page_bytes", 0)) * int(g.get("layers", 0)) for g in groups]
    return max(pages) * run.header.engine.num_blocks if pages and run.header.engine.num_blocks else None


def _slope(
    t_s: NDArray[np.float64], rss: NDArray[np.int64]
) -> tuple[float | None, float | None, float | None]:
    late = t_s >= (t_s[0] + t_s[-1]) / 2
    if late.sum() < STRETCHES:
        return None, None, None
    x = np.array([part.mean() for part in np.array_split(t_s[late], STRETCHES)])
    y = np.array([part.mean() for part in np.array_split(rss[late].astype(np.float64), STRETCHES)])
    if x[0] == x[-1]:  # samples of one moment, as in a changed file
        return None, None, None
    return slope_interval(x, y)
