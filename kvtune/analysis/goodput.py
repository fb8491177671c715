"""Requests a second that kept every limit of the run's SLO: Run -> plain data, None where the run has none. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtune.analysis.latency import e2e_ms, token_gaps_ms, ttft_ms
from kvtune.run.types import Run


def goodput(run: Run) -> dict[str, Any] | None:
    """A request that did not end, or has no such time, kept nothing; one with a single token keeps any `tpot`."""
    slo = run.header.extra.slo
    if not slo:
        return None
    sums, counts = token_gaps_ms(run)
    tpot = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    times = {"ttft": ttft_ms(run), "tpot": tpot, "e2e": e2e_ms(run)}
    sent = np.isfinite(run.table("requests")["sent_s"])
    kept = sent & np.isfinite(times["e2e"])
    for name, limit in slo.items():
        with np.errstate(invalid="ignore"):  # NaN: not reached, and not within any limit
            kept &= times[name] <= limit
    requests, wall_s = int(sent.sum()), run.header.wall_s
    return {
        "slo": dict(slo),
        "requests": int(kept.sum()),
        "share": float(kept.sum() / requests) if requests else None,
        "requests_s": float(kept.sum() / wall_s) if wall_s > 0 else None,
    }
