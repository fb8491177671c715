"""Time that EngineCore's Python takes besides the model: Run -> HostCost. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.types import Run, Table
from kvtune.reading.analysis.spread import Spread, spread

PHASES = ("schedule", "execute", "update", "other")


@dataclass(frozen=True, slots=True)
class HostCost:
    """Mean microseconds of schedule() and update_from_output(), over steps that scheduled a request.

    `per_request_step_us`: both times, summed over these steps, over the number of requests scheduled in them.
    `objects`: net allocations per step (GC-tracked objects made minus freed), by phase; None if not counted.
    """

    steps: int = 0
    schedule_us: float | None = None
    update_us: float | None = None
    per_request_step_us: float | None = None
    step_ms: Spread = field(default_factory=Spread)
    objects: dict[str, float] | None = None


def host_cost(run: Run) -> HostCost:
    table = run.table("steps")
    busy = (table["requests"] > 0) & np.isfinite(table["schedule_us"]) & np.isfinite(table["update_us"])
    if not busy.any():
        return HostCost()
    schedule, update = table["schedule_us"][busy], table["update_us"][busy]
    return HostCost(
        steps=int(busy.sum()),
        schedule_us=float(schedule.mean()),
        update_us=float(update.mean()),
        per_request_step_us=float((schedule.sum() + update.sum()) / table["requests"][busy].sum()),
        step_ms=spread(table["step_us"][busy] / 1000.0),
        objects=_objects(table, busy),
    )


def _objects(table: Table, busy: NDArray[np.bool_]) -> dict[str, float] | None:
    made = {phase: table[f"{phase}_objects"][busy] for phase in PHASES}
    if not any(column.any() for column in made.values()):
        return None
    return {phase: float(column.mean()) for phase, column in made.items()}
