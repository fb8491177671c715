"""Where EngineCore's time went: Run -> StepTime, and what a collection adds to a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds, summed over all steps. `other_s` is what is in a step beside its three parts.

    `prefill_s` is the time of the steps that computed prompt tokens, whole; `gc_s` the collections of the
    process that steps. `busy_share` is step time over wall time, None where there is no wall time.
    """

    steps: int = 0
    total_s: float = 0.0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0
    prefill_s: float = 0.0
    gc_s: float = 0.0
    busy_share: float | None = None


@dataclass(frozen=True, slots=True)
class PausedSteps:
    """Steps in which the stepping process collected, beside those in which it did not; mean milliseconds."""

    paused: int
    others: int
    paused_ms_mean: float
    others_ms_mean: float


def step_time(run: Run) -> StepTime:
    steps = run.table("steps")
    if not len(steps["t_s"]):
        return StepTime()
    total, schedule, execute, update = (
        float(np.nansum(steps[column])) / 1e6
        for column in ("step_us", "schedule_us", "execute_us", "update_us")
    )
    prefill = float(np.nansum(steps["step_us"][steps["prefill_tokens"] > 0])) / 1e6
    gc = run.table("gc")
    own = np.isin(gc["process"], np.unique(steps["process"]))
    return StepTime(
        steps=len(steps["t_s"]),
        total_s=total,
        schedule_s=schedule,
        execute_s=execute,
        update_s=update,
        other_s=max(0.0, total - schedule - execute - update),
        prefill_s=prefill,
        gc_s=float(np.nansum(gc["pause_us"][own])) / 1e6,
        busy_share=min(1.0, total / run.header.wall_s) if run.header.wall_s > 0 else None,
    )


def paused_steps(run: Run) -> PausedSteps | None:
    """None where there is nothing to set against each other."""
    steps = run.table("steps")
    hit = collected_in(run)
    if not hit.any() or hit.all():
        return None
    step_ms = steps["step_us"] / 1000.0
    return PausedSteps(
        int(hit.sum()), int((~hit).sum()), float(step_ms[hit].mean()), float(step_ms[~hit].mean())
    )


def collected_in(run: Run) -> NDArray[np.bool_]:
    """For each step, whether its own process started a collection in it."""
    steps, gc = run.table("steps"), run.table("gc")
    found = np.zeros(len(steps["t_s"]), dtype=np.bool_)
    for process in np.unique(steps["process"]).tolist():
        rows = np.flatnonzero(steps["process"] == process)
        rows = rows[np.argsort(steps["t_s"][rows], kind="stable")]
        start = steps["t_s"][rows]
        end = start + steps["step_us"][rows] / 1e6
        times = gc["t_s"][gc["process"] == process]
        at = np.searchsorted(start, times, side="right") - 1
        inside = at >= 0
        inside[inside] = times[inside] < end[at[inside]]
        found[rows[at[inside]]] = True
    return found
