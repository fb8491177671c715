"""What a list of runs shows about each: a few figures that tell them apart. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from kvtune.analysis.cache import hit_rate
from kvtune.analysis.latency import waits_ms
from kvtune.run.types import RunLabel, Table

COLUMNS = ("prompt_tokens", "hit_tokens", "sent_s", "first_token_s")
"""Columns of `requests` that the figures need."""


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `kvtune runs`. Of an unreadable file only `unreadable` and `file` are set."""

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


def listed(header: RunLabel, requests: Table, file: str, page: str) -> ListedRun:
    """`requests`: the table with the columns COLUMNS, empty if they were not read."""
    first = waits_ms(requests)
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
        hit_rate=hit_rate(requests),
        ttft_ms_mean=float(known.mean()) if len(known) else None,
        state=header.state,
        why=header.why,
    )
