"""Goodput, the requests a second that met every limit of the run's SLO: Run -> plain data. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtune.analysis.latency import RequestTimes
from kvtune.run.types import Run, untimed


def goodput(run: Run, request_times: RequestTimes) -> dict[str, Any] | None:
    """Return the number, share and rate of the requests that met all limits; None without limits or times.

    A request that did not finish meets no limit. A request with a single token meets every `tpot`.
    """
    slo = run.header.extra.slo
    if not slo or untimed(run.header):
        return None
    sums, counts = request_times.gap_sums_ms()
    tpot = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    times = {"ttft": request_times.ttft_ms, "tpot": tpot, "e2e": request_times.e2e_ms}
    sent = np.isfinite(run.table("requests")["sent_s"])
    met = sent & np.isfinite(times["e2e"])
    for name, limit in slo.items():
        with np.errstate(invalid="ignore"):  # NaN meets no limit
            met &= times[name] <= limit
    requests, wall_s = int(sent.sum()), run.header.wall_s
    return {
        "slo": dict(slo),
        "requests": int(met.sum()),
        "share": float(met.sum() / requests) if requests else None,
        "requests_s": float(met.sum() / wall_s) if wall_s > 0 else None,
    }
