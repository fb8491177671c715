"""Resident memory of each process and whether it grows, what GPUs did and held, and the KV pool's bytes. Pure.

A slope is fitted to the samples of the run's second half. For its interval they are taken as means of 20 stretches, as
neighbouring samples are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtune.base.statistics import line
from kvtune.data.run.types import Run
from kvtune.reading.analysis.processes import process_keys
from kvtune.reading.analysis.spread import slope_interval

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


@dataclass(frozen=True, slots=True)
class Memory:
    """One process's RSS. `slope_bytes_s` is fitted to the second half of the samples; None below 3 samples."""

    rss_peak_bytes: int
    rss_last_bytes: int
    slope_bytes_s: float | None
    trend: Trend


def memory(run: Run) -> dict[str, Memory]:
    """Return an entry for each process with samples."""
    table = run.table("memory")
    by_process = {}
    for index, key in enumerate(process_keys(run)):
        rows = np.flatnonzero(table["process"] == index)
        if not len(rows):
            continue
        rows = rows[np.argsort(table["t_s"][rows], kind="stable")]
        t_s, rss, uss = table["t_s"][rows], table["rss_bytes"][rows], table["uss_bytes"][rows]
        late = t_s >= (t_s[0] + t_s[-1]) / 2
        late_s, late_rss, read = t_s[late], rss[late].astype(np.float64), np.flatnonzero(uss)
        slope, low, high = _interval(late_s, late_rss)
        verdict: Growth = "no growth shown"
        if t_s[-1] - t_s[0] < SHORTEST_S or low is None:
            verdict = "too short to tell"
        elif low * 3600 > LEAST_BYTES_H:
            verdict = "grows"
        trend = Trend(slope, low, high, verdict, int(uss[read[-1]]) if len(read) else None)
        by_process[key] = Memory(int(rss.max()), int(rss[-1]), _slope(late_s, late_rss), trend)
    return by_process


def _slope(t_s: NDArray[np.float64], rss: NDArray[np.float64]) -> float | None:
    return line(t_s, rss)[0] if len(t_s) >= 3 and t_s[-1] > t_s[0] else None


def _interval(
    t_s: NDArray[np.float64], rss: NDArray[np.float64]
) -> tuple[float | None, float | None, float | None]:
    if len(t_s) < STRETCHES:
        return None, None, None
    x = np.array([part.mean() for part in np.array_split(t_s, STRETCHES)])
    y = np.array([part.mean() for part in np.array_split(rss, STRETCHES)])
    if x[0] == x[-1]:  # samples of one moment, as in a changed file
        return None, None, None
    return slope_interval(x, y)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One GPU. Means are over samples, about five per second; `energy_j` is power integrated over time."""

    name: str
    busy_share: float
    memory_peak_bytes: int
    power_w: float
    energy_j: float
    clock_mhz: float
    pcie_sent_bytes_s: float
    pcie_received_bytes_s: float


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of one engine's KV pool: `reserved`, and `used` by blocks of running requests (peak and mean)."""

    reserved_bytes: int
    used_peak_bytes: int
    used_mean_bytes: int


def device_use(run: Run) -> list[DeviceUse]:
    table, names = run.table("devices"), run.header.extra.devices
    devices = []
    for device in np.unique(table["device"]).tolist():
        rows = table["device"] == device
        t_s, power = table["t_s"][rows], table["power_w"][rows]
        devices.append(
            DeviceUse(
                name=names[device] if device < len(names) else f"GPU {device}",
                busy_share=float(table["busy_percent"][rows].mean()) / 100.0,
                memory_peak_bytes=int(table["memory_bytes"][rows].max()),
                power_w=float(power.mean()),
                energy_j=float(((power[1:] + power[:-1]) / 2 * np.diff(t_s)).sum()),
                clock_mhz=float(table["clock_mhz"][rows].mean()),
                pcie_sent_bytes_s=float(table["pcie_sent_bytes_s"][rows].mean()),
                pcie_received_bytes_s=float(table["pcie_received_bytes_s"][rows].mean()),
            )
        )
    return devices


def kv_bytes(run: Run, pool_bytes: int) -> KvBytes | None:
    """Return the pool's bytes, or None if its size or its free blocks were not recorded."""
    steps, blocks = run.table("steps"), run.header.engine.num_blocks
    counted = steps["free_blocks"] >= 0
    if not pool_bytes or not blocks or not counted.any():
        return None
    used = 1.0 - np.clip(steps["free_blocks"][counted] / blocks, 0.0, 1.0)
    return KvBytes(pool_bytes, int(used.max() * pool_bytes), int(used.mean() * pool_bytes))
