"""Memory of each process: peak, last value, and whether the process still grows at the end of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtune.base.units import percent, size
from kvtune.data.show.parts import Cell, Grid, Section, cell, grid
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
    rows = [
        (
            process_title(key),
            cell(memory.rss_peak_bytes, size),
            cell(memory.rss_last_bytes, size),
            cell(memory.trend.uss_last_bytes, size),
            cell(memory.slope_bytes_s, lambda slope: f"{_signed(slope)}/s"),
            _interval(memory.trend),
            Cell(memory.trend.verdict, css="differs" if memory.trend.verdict == "grows" else ""),
        )
        for key, memory in by_process.items()
    ]
    heads = (
        "process",
        "peak RSS",
        Column("RSS at the end", rank=1),
        Column("unshared (USS)", rank=4),
        Column("slope of the second half", rank=2),
        Column("95 % interval", rank=3),
        Column("verdict", right=False, rank=1),
    )
    table, devices = grid(heads, rows, "Resident memory by process"), _devices(analysis.devices)
    return Section(
        id="memory",
        title="Memory",
        lead="Resident memory as the system counts it; pages that processes share count in each."
        + (f" The KV pool itself is {size(pool)}{_held(analysis.kv_bytes)}." if pool else ""),
        tables=(table, devices),
    )


def _held(kv: KvBytes | None) -> str:
    if kv is None:
        return ""
    return f", of which running requests held {size(kv.used_peak_bytes)} at most, {size(kv.used_mean_bytes)} on average"


def _devices(devices: Sequence[DeviceUse]) -> Grid:
    heads = ("GPU", "busy", "peak memory", "power", "energy", "SM clock", "PCIe sent", "PCIe received")
    rows = [
        (
            device.name,
            Cell(percent(device.busy_share, digits=0), device.busy_share),
            cell(device.memory_peak_bytes, size),
            Cell(f"{device.power_w:.0f} W", device.power_w),
            Cell(f"{device.energy_j:,.0f} J", device.energy_j),
            Cell(f"{device.clock_mhz:,.0f} MHz", device.clock_mhz),
            Cell(f"{size(device.pcie_sent_bytes_s)}/s", device.pcie_sent_bytes_s),
            Cell(f"{size(device.pcie_received_bytes_s)}/s", device.pcie_received_bytes_s),
        )
        for device in devices
    ]
    return grid(heads, rows, "GPUs, sampled by NVML about five times a second")


def _interval(trend: Trend) -> str:
    if trend.low_bytes_s is None or trend.high_bytes_s is None or math.isnan(trend.low_bytes_s):
        return "–"
    return f"{_signed(trend.low_bytes_s)}/s to {_signed(trend.high_bytes_s)}/s"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{size(value)}"
