"""What a list of runs says about each: a few figures that tell one from another. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from kvtune.analysis.cache import prefix_cache
from kvtune.analysis.latency import ttft_ms
from kvtune.run.types import Run


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `kvtune runs`. `unreadable` files have no other field than that and `file`."""

    file: str
    page: str = ""
    model: str = ""
    workload: str = ""
    spec: str = ""
    core: str = ""
    source: str = ""
    started_at: str = ""
    requests: int = 0
    hit_rate: float | None = None
    ttft_ms_mean: float | None = None
    state: str = "unreadable"
    why: str = ""


def listed(run: Run, file: str, page: str) -> ListedRun:
    header = run.header
    first = ttft_ms(run)
    known = first[np.isfinite(first)]
    return ListedRun(
        file=file,
        page=page,
        model=header.model,
        workload=header.workload.name,
        spec=header.workload.spec,
        core=header.core.name,
        source=header.source,
        started_at=header.started_at,
        requests=header.workload.requests,
        hit_rate=prefix_cache(run, None).hit_rate,
        ttft_ms_mean=float(known.mean()) if len(known) else None,
        state=header.state,
        why=header.why,
    )
