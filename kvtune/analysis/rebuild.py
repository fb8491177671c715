"""A run's workload, rebuilt from its header to classify misses and to replay the run.

A run file may come from anyone, so no path in it is opened. A trace is read only if the user names it.
"""

from __future__ import annotations

from pathlib import Path

from kvtune.errors import KvtuneError, UsageError
from kvtune.run.types import Run
from kvtune.workload.types import Workload


def rebuilt(run: Run, trace: Path | None = None, tokenizer: str = "") -> Workload:
    """Rebuild the run's workload. UsageError if it cannot be rebuilt exactly.

    `trace`: the file to read if the workload was a trace; it may have been renamed since. `tokenizer`: the user's
    tokenizer, which renders a log of text.
    """
    from kvtune.workload.spec import build, traced
    from kvtune.workload.synthetic import at_most

    info = run.header.workload
    if not info.spec:
        raise UsageError("the run file does not name its workload", "record it again with this kvtune")
    spec = traced(info.spec, trace, tokenizer)
    with at_most(len(run.table("requests")["id"])):
        workload = build(spec, seed=info.seed)
    if info.hash and workload.hash != info.hash:
        raise UsageError(
            f"the workload {spec!r} has changed since it was run",
            "name its trace as it was with --trace FILE, or record the run again"
            if trace
            else "record the run again",
        )
    return workload


def workload_of(run: Run, trace: Path | None = None) -> Workload | None:
    """Return the run's workload, or None if it cannot be rebuilt and the user named no trace file."""
    try:
        return rebuilt(run, trace)
    except KvtuneError:
        if trace is not None:
            raise
        return None
