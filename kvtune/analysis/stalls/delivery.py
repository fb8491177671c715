"""A token's delivery from its step to the client: when the front end took it, and what delayed that. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.stalls.causes import CAUSES, COLUMN
from kvtune.analysis.stalls.engine import StepTimes, collected
from kvtune.analysis.stalls.gaps import Gaps
from kvtune.analysis.stalls.off_cpu import OffCpu, cpu_waits, off_cpu
from kvtune.analysis.stalls.spans import Seconds, covered
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class Delivery:
    """`parts[gap, cause]`: seconds that a token took longer than usual from its step to the client."""

    parts: NDArray[np.float64]
    off_cpu: OffCpu

    def without_cpu(self, row: int) -> WithoutCpu:
        """Return one gap's time without a CPU."""
        return WithoutCpu(
            float(self.parts[row, COLUMN["off_cpu"]]),
            int(self.off_cpu.process[row]),
            bool(self.off_cpu.stopped[row]),
        )


@dataclass(frozen=True, slots=True)
class WithoutCpu:
    """Seconds in which a process on a token's way to the client had no CPU. `process`: its index; -1: not known."""

    seconds: float = 0.0
    process: int = -1
    stopped: bool = False


def delivery(run: Run, steps: StepTimes, gaps: Gaps, usual: Gaps, slow_s: float) -> Delivery:
    """Split the delivery of each gap's token by cause. The steps of all gaps must be known."""
    made_s, taken_s = _made_and_taken_s(run, steps, gaps)
    usual_made_s, usual_taken_s = _made_and_taken_s(run, steps, usual)
    way_s, usual_way_s = taken_s - made_s, _median(usual_taken_s - usual_made_s)
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
    # Tokens of one step are late together: time in which any of them was late counts once.
    late = covered(gaps.end_s - late_s, late_s)
    # A thread of EngineCore sends the tokens: none are sent while the process is stopped.
    senders = [own.only_stops() for own in cpu_waits(run, "engine_core")]
    found = off_cpu([*cpu_waits(run, "front_end"), *senders], made_s, gaps.end_s, late, late_s)
    parts[:, front_end] = way_s * (1.0 - found.share)
    parts[:, client] = rest_s * (1.0 - found.share)
    parts[:, COLUMN["off_cpu"]] += late_s * found.share
    return Delivery(parts, found)


def _median(values: Seconds) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _made_and_taken_s(run: Run, steps: StepTimes, gaps: Gaps) -> tuple[Seconds, Seconds]:
    """Return, for each gap, when its token was made, and when the front end next took tokens.

    If the latter was not recorded, the front end counts as taking the token when the client got it.
    """
    receipts = np.sort(run.table("receipts")["t_s"])
    made_s = np.clip(steps.end_s[gaps.made], gaps.begin_s, gaps.end_s)
    if not len(receipts):
        return made_s, gaps.end_s
    at = np.searchsorted(receipts, made_s, side="right")
    taken_s = np.where(at < len(receipts), receipts[np.minimum(at, len(receipts) - 1)], gaps.end_s)
    return made_s, np.minimum(taken_s, gaps.end_s)
