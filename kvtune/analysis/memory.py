"""Resident memory of each process: Run -> Memory per process. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.processes import process_keys
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class Memory:
    """`slope_bytes_s` is fitted to the second half of the samples; None below 3 samples."""

    rss_peak_bytes: int
    rss_last_bytes: int
    slope_bytes_s: float | None


def memory(run: Run) -> dict[str, Memory]:
    """One entry for each process with samples."""
    table = run.table("memory")
    by_process = {}
    for index, key in enumerate(process_keys(run)):
        rows = table["process"] == index
        if not rows.any():
            continue
        t_s, rss = table["t_s"][rows], table["rss_bytes"][rows]
        order = np.argsort(t_s, kind="stable")
        t_s, rss = t_s[order], rss[order]
        late = t_s >= (t_s[0] + t_s[-1]) / 2
        by_process[key] = Memory(int(rss.max()), int(rss[-1]), _slope(t_s[late], rss[late]))
    return by_process


def _slope(t_s: NDArray[np.float64], rss: NDArray[np.int64]) -> float | None:
    if len(t_s) < 3 or t_s[-1] <= t_s[0]:
        return None
    from_mean = t_s - t_s.mean()
    return float((from_mean * (rss - rss.mean())).sum() / (from_mean**2).sum())
