"""The way of a token from its step to the client: when the front end took it, and what delayed that. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.stalls.causes import CAUSES, COLUMN
from kvtune.analysis.stalls.engine import StepTimes, collected
from kvtune.analysis.stalls.gaps import Gaps, steps_of
from kvtune.analysis.stalls.off_cpu import OffCpu, cpu_waits, off_cpu
from kvtune.analysis.stalls.spans import Seconds, covered
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class Delivery:
    """`parts`: seconds over the usual by gap and cause, after the token was made."""

    parts: NDArray[np.float64]
    off_cpu: OffCpu

    def without_cpu(self, row: int) -> WithoutCpu:
        """Of one gap."""
        return WithoutCpu(
            float(self.parts[row, COLUMN["off_cpu"]]),
            int(self.off_cpu.process[row]),
            bool(self.off_cpu.stopped[row]),
        )


@dataclass(frozen=True, slots=True)
class WithoutCpu:
    """Seconds in which a process on a token's way to the client had no CPU; -1: which one is not known."""

    seconds: float = 0.0
    process: int = -1
    stopped: bool = False


def delivery(run: Run, steps: StepTimes, gaps: Gaps, usual: Gaps, slow_s: float) -> Delivery:
    """The steps of all these gaps are known."""
    made_s = steps.end_s[gaps.made]
    taken_s = _taken_s(run, steps, gaps)
    usual_taken_s = _taken_s(run, steps, usual)
    way_s, usual_way_s = taken_s - made_s, _median(usual_taken_s - steps.end_s[usual.made])
    rest_s, usual_rest_s = np.maximum(gaps.end_s - taken_s, 0.0), _median(usual.end_s - usual_taken_s)
    roles = [i for i, process in enumerate(run.header.processes) if process.role == "front_end"]
    collecting, paused = collected(run, roles, slow_s)
    paused_s = paused.within(made_s, gaps.end_s)

    parts = np.zeros((len(made_s), len(CAUSES)))
    parts[:, COLUMN["collection"]] = collecting.within(made_s, gaps.end_s)
    parts[:, COLUMN["off_cpu"]] = np.maximum(paused_s - parts[:, COLUMN["collection"]], 0.0)
    front_end, client = COLUMN["front_end"], COLUMN["client"]
    way_s = np.maximum(way_s - usual_way_s - paused.within(made_s, taken_s), 0.0)
    rest_s = np.maximum(rest_s - usual_rest_s - paused.within(taken_s, gaps.end_s), 0.0)
    late_s = way_s + rest_s
    # Tokens of one step are late together: time in which any was late counts once.
    late = covered(gaps.end_s - late_s, late_s)
    # A thread of EngineCore's sends the tokens: a stopped EngineCore does not.
    senders = [own.only_stops() for own in cpu_waits(run, "engine_core")]
    found = off_cpu([*cpu_waits(run, "front_end"), *senders], made_s, gaps.end_s, late, late_s)
    parts[:, front_end] = way_s * (1.0 - found.share)
    parts[:, client] = rest_s * (1.0 - found.share)
    parts[:, COLUMN["off_cpu"]] += late_s * found.share
    return Delivery(parts, found)


def _median(values: Seconds) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _taken_s(run: Run, steps: StepTimes, gaps: Gaps) -> Seconds:
    """When the front end took the step of each gap's token; the token's own time where that was not recorded."""
    receipts = np.sort(run.table("receipts")["t_s"])
    made_s = steps.end_s[gaps.made]
    if not len(receipts):
        return np.maximum(gaps.end_s, made_s)
    ones = np.ones(len(receipts), np.int64)
    step = steps_of(receipts, ones, np.zeros(len(receipts), np.int64), steps.end_s)
    at = np.searchsorted(step, gaps.made, side="left")
    taken_s = np.where(at < len(receipts), receipts[np.minimum(at, len(receipts) - 1)], gaps.end_s)
    return np.clip(taken_s, made_s, np.maximum(gaps.end_s, made_s))
