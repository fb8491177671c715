"""Memory of each process: peak, last value, and whether it still grows. The timeline shows it over time."""

from __future__ import annotations

import math

from kvtune.analysis.leaks import Trend
from kvtune.analysis.run import RunAnalysis
from kvtune.report.charts import Cell, Section, grid
from kvtune.report.names import process_title
from kvtune.units import size


def section(analysis: RunAnalysis) -> Section | None:
    by_process = analysis.memory
    if not by_process:
        return None
    trend, pool = analysis.trends, analysis.pool_bytes
    rows = [
        (
            process_title(key),
            Cell(size(memory.rss_peak_bytes), memory.rss_peak_bytes),
            Cell(size(memory.rss_last_bytes), memory.rss_last_bytes),
            _bytes(trend[key].uss_last_bytes),
            "–"
            if memory.slope_bytes_s is None
            else Cell(f"{_signed(memory.slope_bytes_s)}/s", memory.slope_bytes_s),
            _interval(trend[key]),
            Cell(trend[key].verdict, css="differs" if trend[key].verdict == "grows" else ""),
        )
        for key, memory in by_process.items()
    ]
    heads = (
        "process",
        "peak RSS",
        "RSS at the end",
        "unshared (USS)",
        "slope of the second half",
        "95 % interval",
        "verdict",
    )
    return Section(
        id="memory",
        title="Memory",
        lead="Resident memory as the system counts it; pages that processes share count in each."
        + (f" The KV pool itself is {size(pool)}." if pool else ""),
        template="memory.html",
        values={"table": grid(heads, rows, "Resident memory by process")},
    )


def _bytes(value: int | None) -> Cell | str:
    return "–" if value is None else Cell(size(value), value)


def _interval(trend: Trend) -> str:
    if trend.low_bytes_s is None or trend.high_bytes_s is None or math.isnan(trend.low_bytes_s):
        return "–"
    return f"{_signed(trend.low_bytes_s)}/s to {_signed(trend.high_bytes_s)}/s"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{size(value)}"
