"""How long engine runs took on this machine, from the run files of a folder: plans estimate durations from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvtune.base.errors import KvtuneError
from kvtune.data.run.file import read_label
from kvtune.data.run.folder import run_files
from kvtune.data.run.machine import this_host
from kvtune.data.run.types import RunLabel

NEWEST = 40
"""Read at most this many files, the newest: reading takes time, and older durations are seldom right."""


@dataclass(frozen=True, slots=True)
class Known:
    """Seconds of a run of this model and load (start included), and of an engine's start; None if not measured."""

    run_s: float | None = None
    start_s: float | None = None


def known_durations(folder: Path, model: str, workload_hash: str, source: str = "engine") -> Known:
    """Return medians over the newest runs on this machine. Without a start of this model, starts of any model count.

    `source`: where the runs took place, `engine` or `host` (a simulated device).
    """
    here = this_host()
    headers = [
        header
        for header in _newest(folder)
        if header.source == source and (header.host.cpu, header.host.cores) == (here.cpu, here.cores)
    ]
    same = [h for h in headers if h.model == model]
    whole = [h for h in same if h.workload.hash == workload_hash and h.state == "complete"]
    started = [h for h in same or headers if h.startup_s > 0]
    return Known(
        run_s=_median([h.startup_s + h.wall_s for h in whole]),
        start_s=_median([h.startup_s for h in started]),
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _newest(folder: Path) -> list[RunLabel]:
    def written(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    headers = []
    for path in sorted(run_files(folder), key=written)[-NEWEST:]:
        try:
            headers.append(read_label(path))
        except KvtuneError:
            continue
    return headers
