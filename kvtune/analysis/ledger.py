"""Collections joined to the steps and token gaps that they delayed, with totals for each process. Pure.

Time of a pause in which its thread had no CPU is not the collector's work: it is counted separately, as `preempted`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.processes import ENGINE_ROLES, process_keys
from kvtune.analysis.spread import Spread, spread
from kvtune.analysis.stalls.spans import covered
from kvtune.analysis.step_time import Placed, placed
from kvtune.run.extras import CollectorCounts
from kvtune.run.types import Run

OUTLIER = 2.0
"""A gap between two tokens of a request is an outlier if it is longer than this many medians."""

EXPLAINED = 0.5
"""Collections explain an outlier if their pauses make up at least this share of its excess over the median."""

PREEMPTED_SHARE = 0.5
PREEMPTED_US = 200.0
"""A pause counts as preempted if its thread had no CPU for more than this share of it and more than this time."""


@dataclass(frozen=True, slots=True)
class GapOutliers:
    """Numbers of gaps between tokens: all, outliers, outliers with a collection, outliers explained by collections.

    Most gaps contain a small collection, so a collection in an outlier proves little: compare
    `other_gaps_with_collection`.
    """

    gaps: int = 0
    median_ms: float | None = None
    threshold_ms: float | None = None
    outliers: int = 0
    with_collection: int = 0
    explained: int = 0
    other_gaps_with_collection: int = 0


@dataclass(frozen=True, slots=True)
class Join:
    """Step times in milliseconds, of steps in which EngineCore collected and of the other steps."""

    placed: Placed = field(default_factory=Placed)
    with_collection: Spread = field(default_factory=Spread)
    without: Spread = field(default_factory=Spread)
    gaps: GapOutliers = field(default_factory=GapOutliers)


@dataclass(frozen=True, slots=True)
class Ledger:
    """One process's collections. `share_of_step`: pauses by generation over the engine's step time; None without steps.

    `survivors_per_step`: objects that survived a young collection, per step of the engine.
    """

    share_of_step: tuple[float, float, float] | None = None
    cpu_ms: float = 0.0
    preempted: int = 0
    preempted_ms: float = 0.0
    thresholds: tuple[int, ...] = ()
    heap_start: int | None = None
    heap_last: int | None = None
    survivors_per_step: float | None = None
    triggers: tuple[tuple[str, int], ...] = ()


def join(run: Run, pause_ms: NDArray[np.float64]) -> Join:
    """Split the steps by whether a collection paused them. `pause_ms`: each step's pauses (`pauses_in_steps_ms`)."""
    step_ms, hit = run.table("steps")["step_us"] / 1000.0, pause_ms > 0
    return Join(placed(run), spread(step_ms[hit]), spread(step_ms[~hit]), gap_outliers(run))


def gap_outliers(run: Run) -> GapOutliers:
    """Count slow gaps by whether collections explain them. A gap has a collection if a process was paused in it.

    Only the part of a pause within the gap counts, wherever the pause began: EngineCore can start its next step, and
    collect, before the front end has the tokens of the previous step.
    """
    tokens, gc = run.table("tokens"), run.table("gc")
    same = tokens["request"][1:] == tokens["request"][:-1]
    begin, end = tokens["t_s"][:-1][same], tokens["t_s"][1:][same]
    if not len(begin):
        return GapOutliers()
    gap_ms = (end - begin) * 1000.0
    median = float(np.median(gap_ms))
    outlier = gap_ms > OUTLIER * median
    paused_ms = covered(gc["t_s"], gc["pause_us"] / 1e6).within(begin, end) * 1000.0
    inside = paused_ms > 0
    explained = outlier & inside & (paused_ms >= EXPLAINED * (gap_ms - median))
    return GapOutliers(
        gaps=len(gap_ms),
        median_ms=median,
        threshold_ms=OUTLIER * median,
        outliers=int(outlier.sum()),
        with_collection=int((outlier & inside).sum()),
        explained=int(explained.sum()),
        other_gaps_with_collection=int((~outlier & inside).sum()),
    )


def ledgers(run: Run) -> dict[str, Ledger]:
    """Return a ledger for each engine process, and for any other process that recorded a collection."""
    gc, steps = run.table("gc"), run.table("steps")
    counted = run.header.extra.ledger
    by_process = {}
    for index, key in enumerate(process_keys(run)):
        info = run.header.processes[index] if index < len(run.header.processes) else None
        rows = gc["process"] == index
        if not rows.any() and (info is None or info.role not in ENGINE_ROLES):
            continue
        stepped = steps["process"] == index
        step_us = float(np.nansum(steps["step_us"][stepped] if stepped.any() else steps["step_us"]))
        of_steps = int(stepped.sum()) or len(steps["t_s"])
        pause, cpu = gc["pause_us"][rows], gc["cpu_us"][rows]
        off_cpu = np.maximum(pause - cpu, 0.0)
        preempted = (off_cpu > PREEMPTED_SHARE * pause) & (off_cpu > PREEMPTED_US)
        counts = counted.get(str(index), CollectorCounts())
        thresholds = info.gc.get("thresholds") if info is not None else None
        by_process[key] = Ledger(
            share_of_step=_by_generation(gc["generation"][rows], pause, step_us),
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


def _by_generation(
    generation: NDArray[np.int8], pause_us: NDArray[np.float64], step_us: float
) -> tuple[float, float, float] | None:
    if step_us <= 0:
        return None
    sums = np.bincount(np.clip(generation, 0, 2), weights=np.nan_to_num(pause_us), minlength=3) / step_us
    return float(sums[0]), float(sums[1]), float(sums[2])


def as_json(joined: Join) -> dict[str, object]:
    """Return the join as `gc_steps` of the summary."""
    return {
        "collections": asdict(joined.placed),
        "step_ms": {"with_collection": asdict(joined.with_collection), "without": asdict(joined.without)},
        "itl_outliers": asdict(joined.gaps),
    }
