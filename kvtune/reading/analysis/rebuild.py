"""A run's workload, rebuilt from its header to classify misses and to replay the run.

A run file may come from anyone, so no path in it is opened. A trace is read only if the user names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvtune.base.errors import KvtuneError, TooLargeError, UsageError
from kvtune.data.run.limits import PROMPT_SPANS, PROMPT_TOKENS
from kvtune.data.run.types import Run
from kvtune.requests.types import Workload

if TYPE_CHECKING:
    from kvtune.requests.loads.sources import Sources


def rebuilt(
    run: Run, trace: Path | None = None, tokenizer: str = "", sources: Sources | None = None
) -> Workload:
    """Rebuild the run's workload. UsageError if it cannot be rebuilt exactly.

    `trace`: the file to read if the workload was a trace; it may have been renamed since. `tokenizer`: the user's
    tokenizer, which renders a log of text.
    """
    from kvtune.requests.loads.spec import build, traced
    from kvtune.requests.loads.synthetic import at_most

    info = run.header.workload
    if not info.spec:
        if run.header.source == "server":
            raise UsageError(
                "the server was recorded without a log of its requests, so there is nothing to replay",
                "record it again with the log that is written meanwhile: kvtune record URL -o RUN --requests LOG",
            )
        raise UsageError("the run file does not name its workload", "record it again with this kvtune")
    spec = traced(info.spec, trace, tokenizer)
    with at_most(len(run.table("requests")["id"]), PROMPT_SPANS):
        workload = build(spec, seed=info.seed, sources=sources)
    if workload.longest > PROMPT_TOKENS:
        raise TooLargeError(
            f"the workload's longest request has {workload.longest:,} tokens, and {PROMPT_TOKENS:,} are allowed",
            "record a run of shorter requests",
        )
    if info.hash and workload.hash != info.hash:
        raise UsageError(
            f"the workload {spec!r} has changed since it was run",
            "name its trace as it was with --trace FILE, or record the run again"
            if trace
            else "record the run again",
        )
    return workload


def with_workload(run: Run, trace: Path | None = None) -> tuple[Run, Workload | None]:
    """Return the run, and its workload as `workload_of` does. If that is too large, a note of the run says so."""
    try:
        return run, rebuilt(run, trace)
    except TooLargeError as error:
        note = f"causes of misses are not told apart: {error.message}"
        header = msgspec.structs.replace(run.header, notes=[*run.header.notes, note])
        return Run(header, run.tables), None
    except KvtuneError:
        if trace is not None:
            raise
        return run, None


def workload_of(run: Run, trace: Path | None = None) -> Workload | None:
    """Return the run's workload, or None if it cannot be rebuilt and the user named no trace file."""
    return with_workload(run, trace)[1]
