"""The parts of EngineCore's step time, and the steps that a collection paused. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.types import Run, untimed
from kvtune.reading.analysis.host.overlap import Hidden


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds, summed over all steps. `other_s`: the rest of the steps besides schedule, execute and update.

    `prefill_s`: steps that computed prompt tokens. `gc_s`: collections in EngineCore. `busy_share`: step time over wall
    time (the mean if several engines share the load); None without a wall time. `exposed_..`: the part of the
    scheduler's Python and of collections that the engine waited for; the device computed during the other part
    (reading/analysis/host/overlap.py).
    """

    steps: int = 0
    total_s: float = 0.0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0
    prefill_s: float = 0.0
    gc_s: float = 0.0
    exposed_host_s: float = 0.0
    exposed_gc_s: float = 0.0
    busy_share: float | None = None


@dataclass(frozen=True, slots=True)
class PausedSteps:
    """Steps in which EngineCore collected: their number (`paused`) out of `steps`, and the mean pause in them.

    `share`: pauses over the time of these steps. The length of these steps alone proves nothing, as longer steps have
    collections more often.
    """

    paused: int
    steps: int
    pause_ms_mean: float
    share: float


def step_time(run: Run, hidden: Hidden = None) -> StepTime:
    """Sum up the steps of a run, none if a nominal step cost gave their times (`untimed`).

    `hidden`: for each step, whether the device hid what the host did (`hidden_steps`).
    """
    steps = run.table("steps")
    if not len(steps["t_s"]) or untimed(run.header):
        return StepTime()
    total, schedule, execute, update = (
        float(np.nansum(steps[column])) / 1e6
        for column in ("step_us", "schedule_us", "execute_us", "update_us")
    )
    # Where batches overlap, the device's time is what a batch adds to the run.
    own_us = steps["device_us"] if hidden is not None else steps["step_us"]
    prefill = (
        float(np.nansum(own_us[steps["prefill_tokens"] > 0])) / max(float(np.nansum(own_us)), 1e-9) * total
    )
    gc = run.table("gc")
    stepping = np.isin(gc["process"], np.unique(steps["process"]))
    exposed = ~hidden if hidden is not None else np.ones(len(steps["t_s"]), bool)
    return StepTime(
        steps=len(steps["t_s"]),
        total_s=total,
        schedule_s=schedule,
        execute_s=execute,
        update_s=update,
        other_s=max(0.0, total - schedule - execute - update),
        prefill_s=prefill,
        gc_s=float(np.nansum(gc["pause_us"][stepping])) / 1e6,
        exposed_host_s=float(np.nansum((steps["schedule_us"] + steps["update_us"])[exposed])) / 1e6,
        exposed_gc_s=_exposed_pauses_s(run, exposed),
        busy_share=min(1.0, total / (run.header.wall_s * len(np.unique(steps["process"]))))
        if run.header.wall_s > 0
        else None,
    )


def paused_steps(run: Run, pause_ms: NDArray[np.float64]) -> PausedSteps | None:
    """Sum up the steps with a collection; None without one. `pause_ms`: each step's pauses (`pauses_in_steps_ms`)."""
    hit = pause_ms > 0
    if not hit.any():
        return None
    step_ms = float(run.table("steps")["step_us"][hit].sum()) / 1000.0
    total = float(pause_ms[hit].sum())
    return PausedSteps(
        int(hit.sum()), len(hit), total / int(hit.sum()), min(1.0, total / step_ms) if step_ms else 0.0
    )


def _exposed_pauses_s(run: Run, exposed: NDArray[np.bool_]) -> float:
    """Sum the pauses in `exposed` steps, and those between steps that precede an exposed step."""
    total_ms = 0.0
    starts = run.table("steps")["t_s"]
    for rows, times, pauses_ms, places in _joined(run):
        following = np.minimum(np.searchsorted(starts[rows], times), len(rows) - 1)
        total_ms += float(np.nansum(pauses_ms[exposed[rows[np.where(places >= 0, places, following)]]]))
    return total_ms / 1000.0


@dataclass(frozen=True, slots=True)
class Placed:
    """EngineCore's collections: within steps, and between steps (while it reads new requests), which delays the next
    step.

    `steps`: steps with a collection. It is often far below `in_steps`, as many new requests at once cause many
    collections in one step.
    """

    in_steps: int = 0
    steps: int = 0
    between_steps: int = 0
    between_ms: float = 0.0


def placed(run: Run) -> Placed:
    in_steps = steps = between = 0
    between_ms = 0.0
    for rows, _, pauses_ms, places in _joined(run):
        inside = places >= 0
        in_steps += int(inside.sum())
        steps += len(np.unique(rows[places[inside]]))
        between += int((~inside).sum())
        between_ms += float(np.nansum(pauses_ms[~inside]))
    return Placed(in_steps, steps, between, between_ms)


def pauses_in_steps_ms(run: Run) -> NDArray[np.float64]:
    """Return, for each step, the pauses of collections that its process started in the step."""
    by_step = np.zeros(len(run.table("steps")["t_s"]), dtype=np.float64)
    for rows, _, pauses_ms, places in _joined(run):
        inside = places >= 0
        np.add.at(by_step, rows[places[inside]], pauses_ms[inside])
    return by_step


Join = tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]


def _joined(run: Run) -> Iterator[Join]:
    """Yield, for each EngineCore, its step rows by time, and each pause's start, length and step (-1: none)."""
    steps, gc = run.table("steps"), run.table("gc")
    for process in np.unique(steps["process"]).tolist():
        rows = np.flatnonzero(steps["process"] == process)
        rows = rows[np.argsort(steps["t_s"][rows], kind="stable")]
        start = steps["t_s"][rows]
        end = start + steps["step_us"][rows] / 1e6
        collected = gc["process"] == process
        times, pauses = gc["t_s"][collected], gc["pause_us"][collected] / 1000.0
        places = np.searchsorted(start, times, side="right") - 1
        places[(places >= 0) & (times >= end[places])] = -1
        yield rows, times, pauses, places
