"""A run's processes, command, source lines and times as text."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path

from kvtune.base.units import count
from kvtune.data.run.types import Run, WorkloadInfo
from kvtune.reading.analysis.processes import process_keys, process_title


def process_name(run: Run, index: int) -> str:
    """Return the title of the process with this number in the run's tables."""
    keys = process_keys(run)
    return process_title(keys[index]) if 0 <= index < len(keys) else f"process {index}"


def command_text(run: Run) -> str:
    """Return the command line that the file names, as data, without the folder that its program is installed in."""
    words = run.header.command
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""


def source_line(file: str, line: int) -> str:
    """Return `vllm/v1/core/block_pool.py:120`: the path without the folder that its package is installed in."""
    if not file:
        return "–"
    for root in ("/site-packages/", "/dist-packages/", "/lib/python3"):
        _, matched, tail = file.rpartition(root)
        if matched:
            file = tail.split("/", 1)[-1] if root == "/lib/python3" else tail
            break
    else:
        _, matched, tail = file.rpartition("/kvtune/")
        file = f"kvtune/{tail}" if matched else file
    return f"{file}:{line}" if line else file


def load_text(workload: WorkloadInfo) -> str:
    """Return a load for a page's head: its spec; of a log its requests, with the hours of which they were taken."""
    if workload.name != "requests":
        return workload.spec
    begun, end = (workload.params.get(name) for name in ("since", "until"))
    hours = ""
    if isinstance(begun, float) and isinstance(end, float) and 0 < begun <= end:
        times = [datetime.fromtimestamp(moment, UTC) for moment in (begun, end)]
        hours = f", {times[0]:%H:%M:%S} to {times[1]:%H:%M:%S} UTC"
    return f"{count(workload.requests)} requests of {Path(str(workload.params.get('path', ''))).name}{hours}"


def when(started_at: str) -> str:
    """Return a time as `21 November 2026, 10:53 UTC`, or the text unchanged if it is not a time."""
    try:
        moment = datetime.fromisoformat(started_at).astimezone(UTC)
    except ValueError:
        return started_at
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"
