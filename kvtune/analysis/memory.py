"""Resident memory of each process, what GPUs did and held, and the KV pool's bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.processes import process_keys
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class Memory:
    """One process's RSS. `slope_bytes_s` is fitted to the second half of the samples; None below 3 samples."""

    rss_peak_bytes: int
    rss_last_bytes: int
    slope_bytes_s: float | None


def memory(run: Run) -> dict[str, Memory]:
    """Return an entry for each process with samples."""
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
    found = []
    for device in np.unique(table["device"]).tolist():
        rows = table["device"] == device
        t_s, power = table["t_s"][rows], table["power_w"][rows]
        found.append(
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
    return found


def kv_bytes(run: Run, pool_bytes: int) -> KvBytes | None:
    """Return the pool's bytes, or None if its size or its free blocks were not recorded."""
    steps, blocks = run.table("steps"), run.header.engine.num_blocks
    known = steps["free_blocks"] >= 0
    if not pool_bytes or not blocks or not known.any():
        return None
    used = 1.0 - np.clip(steps["free_blocks"][known] / blocks, 0.0, 1.0)
    return KvBytes(pool_bytes, int(used.max() * pool_bytes), int(used.mean() * pool_bytes))
