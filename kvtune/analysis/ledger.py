"""Collections joined to what they held up: Run -> steps with and without, token gaps explained, each process's ledger.

Pure. A pause that its thread did not spend computing was a preemption by the machine, not the collector's work: it is
counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.processes import ENGINE_ROLES, process_keys
from kvtune.analysis.spread import Spread, spread
from kvtune.analysis.step_time import Placed, pauses_in_steps_ms, placed
from kvtune.run.extras import CollectorCounts
from kvtune.run.types import Run

OUTLIER = 2.0
"""A gap between two tokens of a request that is longer than this many medians is an outlier."""

EXPLAINED = 0.5
"""Collections explain an outlier when their pauses make at least this share of what it is over the median."""

PREEMPTED_SHARE = 0.5
PREEMPTED_US = 200.0
"""A pause is called preempted when that share of it, and at least so much, its thread was not on a CPU."""


@dataclass(frozen=True, slots=True)
class GapOutliers:
    """Of the gaps between tokens: how many are outliers, hold a collection, are explained by collections.

    Small collections come in most gaps, so holding one proves little: see how many other gaps hold one too.
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
    """Step times in milliseconds of the steps in which EngineCore collected and of those in which it did not."""

    placed: Placed = field(default_factory=Placed)
    with_collection: Spread = field(default_factory=Spread)
    without: Spread = field(default_factory=Spread)
    gaps: GapOutliers = field(default_factory=GapOutliers)


@dataclass(frozen=True, slots=True)
class Ledger:
    """One process. Shares are of the engine's step time, by generation; None where no step was recorded.

    `survivors_per_step`: young objects that a collection found alive, for each step of the engine.
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


def join(run: Run) -> Join:
    steps = run.table("steps")
    step_ms, hit = steps["step_us"] / 1000.0, pauses_in_steps_ms(run) > 0
    return Join(placed(run), spread(step_ms[hit]), spread(step_ms[~hit]), gap_outliers(run))


def gap_outliers(run: Run) -> GapOutliers:
    """A gap holds a collection when any of the engine's processes was paused for some of it.

    By what of a pause lies in the gap, not by where it began: EngineCore's next step begins, and may collect, before
    the front end has the tokens of the last one.
    """
    tokens, gc = run.table("tokens"), run.table("gc")
    same = tokens["request"][1:] == tokens["request"][:-1]
    begin, end = tokens["t_s"][:-1][same], tokens["t_s"][1:][same]
    if not len(begin):
        return GapOutliers()
    gap_ms = (end - begin) * 1000.0
    median = float(np.median(gap_ms))
    outlier = gap_ms > OUTLIER * median
    paused_ms = _paused_ms(gc["t_s"], gc["pause_us"] / 1e6, begin, end)
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


def _paused_ms(
    start_s: NDArray[np.float64],
    pause_s: NDArray[np.float64],
    begin_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
) -> NDArray[np.float64]:
    """How long of each span at least one pause lasted: pauses of several processes at once count once."""
    if not len(start_s):
        return np.zeros(len(begin_s))
    order = np.argsort(start_s, kind="stable")
    start, end = start_s[order], (start_s + np.nan_to_num(pause_s))[order]
    reached = np.maximum.accumulate(end)
    start = np.maximum(start, np.concatenate(([-np.inf], reached[:-1])))
    length = np.maximum(end - start, 0.0)
    # Time paused so far, as a line that rises within pauses and is level between them.
    at = np.column_stack((start, start + length)).ravel()
    before = np.cumsum(length) - length
    so_far = np.column_stack((before, before + length)).ravel()
    paused: NDArray[np.float64] = np.interp(end_s, at, so_far) - np.interp(begin_s, at, so_far)
    return paused * 1000.0


def ledgers(run: Run) -> dict[str, Ledger]:
    """One for each engine process."""
    gc, steps = run.table("gc"), run.table("steps")
    counted = run.header.extra.ledger
    found = {}
    for index, key in enumerate(process_keys(run)):
        info = run.header.processes[index] if index < len(run.header.processes) else None
        own = gc["process"] == index
        if not own.any() and (info is None or info.role not in ENGINE_ROLES):
            continue
        of_own = steps["process"] == index
        step_us = float(np.nansum(steps["step_us"][of_own] if of_own.any() else steps["step_us"]))
        pause, cpu = gc["pause_us"][own], gc["cpu_us"][own]
        off_cpu = np.maximum(pause - cpu, 0.0)
        preempted = (off_cpu > PREEMPTED_SHARE * pause) & (off_cpu > PREEMPTED_US)
        counts = counted.get(str(index), CollectorCounts())
        thresholds = info.gc.get("thresholds") if info is not None else None
        found[key] = Ledger(
            share_of_step=_by_generation(gc["generation"][own], pause, step_us),
            cpu_ms=float(np.nansum(cpu)) / 1000.0,
            preempted=int(preempted.sum()),
            preempted_ms=float(off_cpu[preempted].sum()) / 1000.0,
            thresholds=tuple(int(n) for n in thresholds) if isinstance(thresholds, list) else (),
            heap_start=counts.heap.start,
            heap_last=counts.heap.last,
            survivors_per_step=counts.survivors / len(steps["t_s"])
            if counts.survivors is not None and len(steps["t_s"])
            else None,
            triggers=tuple((f"{t.file}:{t.line}", t.collections) for t in counts.triggers),
        )
    return found


def _by_generation(
    generation: NDArray[np.int8], pause_us: NDArray[np.float64], step_us: float
) -> tuple[float, float, float] | None:
    if step_us <= 0:
        return None
    sums = np.bincount(np.clip(generation, 0, 2), weights=np.nan_to_num(pause_us), minlength=3) / step_us
    return float(sums[0]), float(sums[1]), float(sums[2])


def as_json(run: Run) -> dict[str, Any]:
    """The summary's `gc_steps`."""
    from dataclasses import asdict

    found = join(run)
    return {
        "collections": asdict(found.placed),
        "step_ms": {"with_collection": asdict(found.with_collection), "without": asdict(found.without)},
        "itl_outliers": asdict(found.gaps),
    }
