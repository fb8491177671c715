"""The cost of Python's garbage collector in each process, and the steps that it paused. Pure.

Time of a pause in which its thread had no CPU is not the collector's work: it is counted separately, as `preempted`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.extras import CollectorCounts
from kvtune.data.run.types import Run
from kvtune.reading.analysis.processes import ENGINE_ROLES, process_keys
from kvtune.reading.analysis.spread import Spread, spread
from kvtune.reading.analysis.step_time import Placed, placed

PREEMPTED_SHARE = 0.5
PREEMPTED_US = 200.0
"""A pause counts as preempted if its thread had no CPU for more than this share of it and more than this time."""


@dataclass(frozen=True, slots=True)
class Collector:
    """One process's collections: their number in each generation, and pauses of all generations together.

    `share_of_step`, `share_by_generation`: pauses over the engine's step time; None if no steps were recorded.
    `frozen`: objects that the collector leaves alone (`gc.freeze`); None if the process did not report them.
    `survivors_per_step`: objects that survived a young collection, per step of the engine.
    """

    collections: tuple[int, int, int] = (0, 0, 0)
    pause_total_ms: float = 0.0
    pause_max_ms: float = 0.0
    pause_p99_ms: float = 0.0
    share_of_step: float | None = None
    share_by_generation: tuple[float, float, float] | None = None
    frozen: int | None = None
    cpu_ms: float = 0.0
    preempted: int = 0
    preempted_ms: float = 0.0
    thresholds: tuple[int, ...] = ()
    heap_start: int | None = None
    heap_last: int | None = None
    survivors_per_step: float | None = None
    triggers: tuple[tuple[str, int], ...] = ()

    def plain(self) -> dict[str, Any]:
        """The process's entry of `gc` in the summary."""
        fields = asdict(self)
        pauses = {name: fields.pop(f"pause_{name}_ms") for name in ("total", "max", "p99")}
        return {**fields, "collections_total": sum(self.collections), "pause_ms": pauses}


def collectors(run: Run) -> dict[str, Collector]:
    """Return figures for each engine process, and for any other process that recorded a collection.

    The shares of a process without steps are relative to an EngineCore's step time, the mean of several. Steps need
    not have waited for these pauses.
    """
    table, steps = run.table("gc"), run.table("steps")
    engines = max(1, len(np.unique(steps["process"])))
    by_process: dict[str, Collector] = {}
    for index, key in enumerate(process_keys(run)):
        info = run.header.processes[index] if index < len(run.header.processes) else None
        rows = table["process"] == index
        if not rows.any() and (info is None or info.role not in ENGINE_ROLES):
            continue
        stepped = steps["process"] == index
        of_steps = int(stepped.sum()) or len(steps["t_s"])
        step_us = float(np.nansum(steps["step_us"]) / engines)
        if stepped.any():
            step_us = float(np.nansum(steps["step_us"][stepped]))
        pause, cpu = table["pause_us"][rows], table["cpu_us"][rows]
        generation = np.clip(table["generation"][rows], 0, 2)
        number = np.bincount(generation, minlength=3).tolist()
        paused = np.bincount(generation, weights=np.nan_to_num(pause), minlength=3).tolist()
        off_cpu = np.maximum(pause - cpu, 0.0)
        preempted = (off_cpu > PREEMPTED_SHARE * pause) & (off_cpu > PREEMPTED_US)
        counts = run.header.extra.ledger.get(str(index), CollectorCounts())
        facts = info.gc if info is not None else {}
        frozen, thresholds = facts.get("frozen"), facts.get("thresholds")
        by_process[key] = Collector(
            collections=(number[0], number[1], number[2]),
            pause_total_ms=float(np.nansum(pause)) / 1000.0,
            pause_max_ms=float(np.max(pause, initial=0.0)) / 1000.0,
            pause_p99_ms=float(np.percentile(pause, 99)) / 1000.0 if len(pause) else 0.0,
            share_of_step=float(np.nansum(pause)) / step_us if step_us > 0 else None,
            share_by_generation=(paused[0] / step_us, paused[1] / step_us, paused[2] / step_us)
            if step_us > 0
            else None,
            frozen=int(frozen) if isinstance(frozen, int) else None,
            cpu_ms=float(np.nansum(cpu)) / 1000.0,
            preempted=int(preempted.sum()),
            preempted_ms=float(off_cpu[preempted].sum()) / 1000.0,
            thresholds=tuple(int(n) for n in thresholds) if isinstance(thresholds, list) else (),
            heap_start=counts.heap.start,
            heap_last=counts.heap.last,
            survivors_per_step=counts.survivors / of_steps
            if counts.survivors is not None and of_steps
            else None,
            triggers=tuple((f"{t.file}:{t.line}", t.collections) for t in counts.triggers),
        )
    return by_process


@dataclass(frozen=True, slots=True)
class Join:
    """Step times in milliseconds, of steps in which EngineCore collected and of the other steps."""

    placed: Placed = field(default_factory=Placed)
    with_collection: Spread = field(default_factory=Spread)
    without: Spread = field(default_factory=Spread)

    def plain(self) -> dict[str, object]:
        """The summary's `gc_steps`."""
        times = {"with_collection": asdict(self.with_collection), "without": asdict(self.without)}
        return {"collections": asdict(self.placed), "step_ms": times}


def join(run: Run, pause_ms: NDArray[np.float64]) -> Join:
    """Split the steps by whether a collection paused them. `pause_ms`: each step's pauses (`pauses_in_steps_ms`)."""
    step_ms, hit = run.table("steps")["step_us"] / 1000.0, pause_ms > 0
    return Join(placed(run), spread(step_ms[hit]), spread(step_ms[~hit]))
