"""Does a process grow: Run -> a verdict for each, with the slope's interval; what else is known of its memory. Pure.

The slope is that of the second half of the run, over means of stretches: neighbouring samples are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.processes import process_keys
from kvtune.run.types import Run

STRETCHES = 20
SHORTEST_S = 60.0
"""A second half shorter than half of this says nothing about leaks: caches and allocators are still filling."""
WORTH_BYTES_H = 64 << 20
"""Growth below this an hour is no leak that anybody would look for."""

Growth = Literal["grows", "no growth shown", "too short to tell"]


@dataclass(frozen=True, slots=True)
class Trend:
    """Bytes a second between `low` and `high` with 95 % confidence, RSS. `uss_last_bytes` None: never read."""

    slope_bytes_s: float | None
    low_bytes_s: float | None
    high_bytes_s: float | None
    verdict: Growth
    uss_last_bytes: int | None


def trends(run: Run) -> dict[str, Trend]:
    table = run.table("memory")
    found = {}
    for index, key in enumerate(process_keys(run)):
        own = table["process"] == index
        if not own.any():
            continue
        t_s, rss, uss = table["t_s"][own], table["rss_bytes"][own], table["uss_bytes"][own]
        read = np.flatnonzero(uss)
        slope, low, high = _slope(t_s, rss)
        verdict: Growth = "no growth shown"
        if t_s[-1] - t_s[0] < SHORTEST_S or low is None:
            verdict = "too short to tell"
        elif low * 3600 > WORTH_BYTES_H:
            verdict = "grows"
        found[key] = Trend(slope, low, high, verdict, int(uss[read[-1]]) if len(read) else None)
    return found


def pool_bytes(run: Run) -> int | None:
    """The KV pool's own bytes: groups share tensors, so the group with most layers says how many there are."""
    groups = run.header.engine.groups
    pages = [int(g.get("page_bytes", 0)) * int(g.get("layers", 0)) for g in groups]
    return max(pages) * run.header.engine.num_blocks if pages and run.header.engine.num_blocks else None


def _slope(
    t_s: NDArray[np.float64], rss: NDArray[np.int64]
) -> tuple[float | None, float | None, float | None]:
    late = t_s >= (t_s[0] + t_s[-1]) / 2
    if late.sum() < STRETCHES:
        return None, None, None
    from scipy.stats import linregress, t

    x = np.array([part.mean() for part in np.array_split(t_s[late], STRETCHES)])
    y = np.array([part.mean() for part in np.array_split(rss[late].astype(np.float64), STRETCHES)])
    fit = linregress(x, y)
    wide = float(t.ppf(0.975, STRETCHES - 2)) * float(fit.stderr)
    return float(fit.slope), float(fit.slope) - wide, float(fit.slope) + wide
