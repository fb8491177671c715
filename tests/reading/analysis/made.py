"""Hand-made runs: a workload with given times, so that expected figures can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvtune.data.run.types import (
    TABLES,
    CoreInfo,
    EngineInfo,
    Header,
    HostInfo,
    ProcessInfo,
    Run,
    Table,
    WorkloadInfo,
)
from kvtune.requests.types import Request, Span, Workload

PROCESSES = [
    ProcessInfo(pid=1, role="front_end", gc={"frozen": 7}),
    ProcessInfo(pid=2, role="engine_core", gc={"frozen": 500}),
    ProcessInfo(pid=3, role="worker"),
    ProcessInfo(pid=4, role="worker"),
    ProcessInfo(pid=5, role="helper"),
]


def workload_of(
    prompts: Sequence[Sequence[Span]], rounds: Sequence[int] | None = None, output: int = 4
) -> Workload:
    requests = [
        Request(str(i), tuple(prompt), output, round=-1 if rounds is None else rounds[i])
        for i, prompt in enumerate(prompts)
    ]
    return Workload("made", "made", {}, 0, requests, "made-hash")


def table(name: str, **columns: Sequence[Any]) -> Table:
    """A table; columns that are not given are zero or empty."""
    rows = len(next(iter(columns.values())))
    by_name: Table = {}
    for column, kind in TABLES[name].items():
        if column in columns:
            by_name[column] = np.array(columns[column], dtype=None if kind == "U" else kind)
        else:
            by_name[column] = np.full(rows, "" if kind == "U" else 0, dtype="U1" if kind == "U" else kind)
    return by_name


def header_of(workload: Workload | None = None, **fields: Any) -> Header:
    named = workload or workload_of([])
    default: dict[str, Any] = {
        "kvtune": "0",
        "source": "engine",
        "started_at": "2026-01-01T00:00:00Z",
        "command": ["kvtune"],
        "model": "tiny-opt",
        "workload": WorkloadInfo(
            name=named.name,
            spec=named.spec,
            params=named.params,
            seed=named.seed,
            hash=named.hash,
            requests=len(named.requests),
        ),
        "core": CoreInfo(name="stock"),
        "engine": EngineInfo(vllm="0.32.0", device="cpu", block_size=16, num_blocks=100),
        "python": "3.11.7",
        "host": HostInfo(cpu="made", cores=2),
        "processes": PROCESSES,
        "wall_s": 10.0,
    }
    return Header(**{**default, **fields})


def served(
    workload: Workload,
    hits: Sequence[int],
    *,
    sent: Sequence[float] | None = None,
    first: Sequence[float] | None = None,
    finished: Sequence[float] | None = None,
    finish: Sequence[str] | None = None,
    output: Sequence[int] | None = None,
    tables: Mapping[str, Table] | None = None,
    **fields: Any,
) -> Run:
    """A run of `workload`: by default one after another, first token after 0.5 s, done after 1 s."""
    n = len(workload.requests)
    start = list(sent) if sent is not None else [float(i) for i in range(n)]
    requests = table(
        "requests",
        id=[r.id for r in workload.requests],
        kind=[r.kind for r in workload.requests],
        round=[r.round for r in workload.requests],
        prompt_tokens=[r.prompt_tokens for r in workload.requests],
        output_tokens=list(output) if output is not None else [r.output_tokens for r in workload.requests],
        hit_tokens=list(hits),
        planned_s=[np.nan] * n,
        sent_s=start,
        first_token_s=list(first) if first is not None else [s + 0.5 for s in start],
        finished_s=list(finished) if finished is not None else [s + 1.0 for s in start],
        finish=list(finish) if finish is not None else ["length"] * n,
    )
    return Run(header_of(workload, **fields), {"requests": requests, **(tables or {})})
