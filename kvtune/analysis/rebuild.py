"""The workload of a run, rebuilt from its header; needed to classify misses. Reads trace files."""

from __future__ import annotations

from kvtune.errors import KvtuneError
from kvtune.run.types import Run
from kvtune.workload.types import Workload


def workload_of(run: Run) -> Workload | None:
    """None where it cannot be rebuilt exactly, for example because a trace file is gone or changed."""
    from kvtune.workload.spec import build

    info = run.header.workload
    try:
        workload = build(info.spec, seed=info.seed)
    except (KvtuneError, OSError, ValueError):
        return None
    return workload if workload.hash == info.hash else None
