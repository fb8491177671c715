"""The cost of Python's garbage collector in each process: Run -> Collector per process. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtune.analysis.processes import ENGINE_ROLES, process_keys
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class Collector:
    """One process's collections: their number in each generation, and pauses of all generations together.

    `share_of_step`: pauses over the engine's step time; None if no steps were recorded. `frozen`: objects that the
    collector leaves alone (`gc.freeze`); None if the process did not report them.
    """

    collections: tuple[int, int, int] = (0, 0, 0)
    pause_total_ms: float = 0.0
    pause_max_ms: float = 0.0
    pause_p99_ms: float = 0.0
    share_of_step: float | None = None
    frozen: int | None = None


def collectors(run: Run) -> dict[str, Collector]:
    """Return figures for each engine process, and for any other process that recorded a collection.

    `share_of_step` of other processes is relative to EngineCore's step time, too. Steps need not have waited for these
    pauses.
    """
    table, steps = run.table("gc"), run.table("steps")
    by_process: dict[str, Collector] = {}
    for index, key in enumerate(process_keys(run)):
        info = run.header.processes[index] if index < len(run.header.processes) else None
        rows = table["process"] == index
        if not rows.any() and (info is None or info.role not in ENGINE_ROLES):
            continue
        pause_ms = table["pause_us"][rows] / 1000.0
        generation = np.bincount(np.clip(table["generation"][rows], 0, 2), minlength=3)
        stepped = steps["process"] == index
        step_ms = float(np.nansum(steps["step_us"][stepped] if stepped.any() else steps["step_us"])) / 1000.0
        total = float(np.nansum(pause_ms))
        frozen = info.gc.get("frozen") if info is not None else None
        by_process[key] = Collector(
            collections=(int(generation[0]), int(generation[1]), int(generation[2])),
            pause_total_ms=total,
            pause_max_ms=float(np.max(pause_ms, initial=0.0)),
            pause_p99_ms=float(np.percentile(pause_ms, 99)) if len(pause_ms) else 0.0,
            share_of_step=total / step_ms if step_ms > 0 else None,
            frozen=int(frozen) if isinstance(frozen, int) else None,
        )
    return by_process
