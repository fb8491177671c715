"""Delays outside the engine's steps: a request's transport to the engine and back, and the engine's loop.

Each delay is a median over a recorded run, so that single long pauses between steps do not count. Runs anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.run.types import Run, Table

FEWEST = 3
"""With fewer samples than this, a delay is taken as 0 and its time counts as unexplained (`cost.py`)."""


@dataclass(frozen=True, slots=True)
class TransportDelay:
    """Delays in microseconds; the fields are those of `StepCost` (fake_device/cost.py)."""

    between_us: float = 0.0
    enter_us: float = 0.0
    leave_us: float = 0.0

    @classmethod
    def of(cls, run: Run, steps: Table) -> TransportDelay:
        """Measure the delays of a run. `steps`: rows of its steps table, in order of time."""
        begins = steps["t_s"]
        ends = begins + steps["step_us"] * 1e-6
        pending = (steps["running"] + steps["waiting"])[:-1] > 0
        sent = run.table("requests")["sent_s"]
        sent = sent[(sent > begins[0]) & (sent <= begins[-1])]
        following = np.searchsorted(begins, sent)
        idle = (ends[following - 1] <= sent) & ~pending[following - 1] if len(sent) else np.zeros(0, bool)
        tokens = run.table("tokens")["t_s"]
        tokens = tokens[(tokens >= ends[0]) & (tokens <= ends[-1])]
        leave_us = _median_us(tokens - ends[np.searchsorted(ends, tokens, side="right") - 1])
        # In an engine that is never idle, enter_us is unknown: use leave_us, as answers cross the same processes.
        measurable = idle.sum() >= FEWEST
        return cls(
            between_us=_median_us((begins[1:] - ends[:-1])[pending]),
            enter_us=_median_us((begins[following] - sent)[idle]) if measurable else leave_us,
            leave_us=leave_us,
        )


def in_flight(requests: Table, since_s: float) -> tuple[float, int]:
    """Return the seconds after `since_s` with at least one request in flight, and the number of separate periods."""
    done = np.isfinite(requests["sent_s"]) & np.isfinite(requests["finished_s"])
    if not done.any():
        return 0.0, 0
    order = np.argsort(requests["sent_s"][done])
    sent = np.maximum(requests["sent_s"][done][order], since_s)
    finished = np.maximum.accumulate(requests["finished_s"][done][order])
    before = np.concatenate(([since_s], finished[:-1]))
    pieces = int((sent > before).sum()) + int(sent[0] <= since_s < finished[0])
    return float(np.maximum(finished - np.maximum(sent, before), 0.0).sum()), pieces


def _median_us(seconds: NDArray[np.float64]) -> float:
    return max(0.0, float(np.median(seconds)) * 1e6) if len(seconds) >= FEWEST else 0.0
