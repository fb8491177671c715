"""Memory of each process: peak, last value, and whether the process still grows at the end of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtune.base.units import percent, size
from kvtune.data.show.parts import Cell, Grid, Section, cell, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.memory import DeviceUse, KvBytes, Trend
from kvtune.reading.analysis.processes import process_title
from kvtune.reading.analysis.run import RunAnalysis

PLACE = 110


def section(analysis: RunAnalysis) -> Section | None:
    by_process = analysis.memory
    if not by_process:
        return None
    pool = analysis.pool_bytes
    rows = (
        {
            "process": process_title(key),
            "peak RSS": cell(memory.rss_peak_bytes, size),
            Column("RSS at the end", rank=1): cell(memory.rss_last_bytes, size),
            Column("unshared (USS)", rank=4): cell(memory.trend.uss_last_bytes, size),
            Column("slope of the second half", rank=2): cell(memory.slope_bytes_s, _rate),
            Column("95 % interval", rank=3): _interval(memory.trend),
            Column("verdict", right=False, rank=1): Cell(
                memory.trend.verdict, css="differs" if memory.trend.verdict == "grows" else ""
            ),
        }
        for key, memory in by_process.items()
    )
    return Section(
        id="memory",
        title="Memory",
        lead="Resident memory as the system counts it; pages that processes share count in each."
        + (f" The KV pool itself is {size(pool)}{_held(analysis.kv_bytes)}." if pool else ""),
        tables=(grid_of(rows, "Resident memory by process"), _devices(analysis.devices)),
    )


def _held(kv: KvBytes | None) -> str:
    if kv is None:
        return ""
    return f", of which running requests held {size(kv.used_peak_bytes)} at most, {size(kv.used_mean_bytes)} on average"


def _devices(devices: Sequence[DeviceUse]) -> Grid:
    rows = (
        {
            "GPU": device.name,
            "busy": Cell(percent(device.busy_share, digits=0), device.busy_share),
            "peak memory": cell(device.memory_peak_bytes, size),
            "power": cell(device.power_w, "{:.0f} W".format),
            "energy": cell(device.energy_j, "{:,.0f} J".format),
            "SM clock": cell(device.clock_mhz, "{:,.0f} MHz".format),
            "PCIe sent": Cell(f"{size(device.pcie_sent_bytes_s)}/s", device.pcie_sent_bytes_s),
            "PCIe received": Cell(f"{size(device.pcie_received_bytes_s)}/s", device.pcie_received_bytes_s),
        }
        for device in devices
    )
    return grid_of(rows, "GPUs, sampled by NVML about five times a second")


def _interval(trend: Trend) -> str:
    if trend.low_bytes_s is None or trend.high_bytes_s is None or math.isnan(trend.low_bytes_s):
        return "–"
    return f"{_rate(trend.low_bytes_s)} to {_rate(trend.high_bytes_s)}"


def _rate(bytes_s: float) -> str:
    return f"{'+' if bytes_s > 0 else ''}{size(bytes_s)}/s"
