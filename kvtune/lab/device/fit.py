"""Fits a step's time, and the transport time between client and engine, to a recorded run. Runs anywhere.

The fit is non-negative least squares over the run's steps. Times of a simulated run are predictions if its cost was
fitted; with the nominal cost they mean nothing, and the run says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtune.base.errors import KvtuneError
from kvtune.data.run.engines import of_engine, ranks
from kvtune.data.run.step_work import fit_step_time, step_work, waited_for
from kvtune.data.run.types import Run, Table
from kvtune.lab.device.cost import StepCost

FEWEST = 3
"""A delay with fewer samples than this is taken as 0, and its time counts as unexplained (`cost.py`)."""


@dataclass(frozen=True, slots=True)
class TransportDelay:
    """Delays in microseconds; the fields are those of `StepCost` (lab/device/cost.py)."""

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


MIN_STEPS = 20
FITTED_SHARE = 0.6
"""The held-out check fits to this share of the steps, the first in time, and predicts the rest."""

Clock = Literal["wall", "cpu", "device"]
"""Which time of a step is predicted: wall time, CPU time of EngineCore's thread, or the device's busy time."""

WARM_UP_SHARE = 0.02
_COLUMN: dict[Clock, str] = {"wall": "step_us", "cpu": "cpu_us", "device": "device_us"}


def fit(run: Run, clock: Clock | None = None) -> StepCost:
    """Fit the cost of a step on the machine of `run` to the run's steps table.

    `clock` None: device time with async scheduling, else wall time. If EngineCore's own thread runs the model (the
    `uni` executor on a CPU), the thread's CPU time is used if it fits better; other processes do not lengthen it.
    The first 2 % of the steps are left out as warm-up. Of several engines, only the first one's steps are used.
    """
    run = of_engine(run, ranks(run)[0])
    steps = run.table("steps")
    busy = np.flatnonzero(steps["scheduled_tokens"] > 0)
    busy = busy[int(len(busy) * WARM_UP_SHARE) :]
    if len(busy) < MIN_STEPS:
        raise KvtuneError(
            f"the run has {len(busy)} usable steps, a step cost needs {MIN_STEPS}",
            "record a longer run with `--probe light`",
        )
    used = {name: column[busy] for name, column in steps.items()}
    if clock is not None:
        return _fit(run, used, clock)
    if run.header.engine.async_scheduling and _has_device_time(used):
        return _fit(run, used, "device")  # steps overlap, so their wall times would count some time twice
    own_thread = run.header.engine.device == "cpu" and run.header.engine.executor == "uni"
    costs = [_fit(run, used, kind) for kind in (("wall", "cpu") if own_thread else ("wall",))]
    return min(costs, key=lambda cost: max(cost.held_out_share, cost.unexplained_share))


def _fit(run: Run, steps: Table, clock: Clock) -> StepCost:
    column = _COLUMN[clock]
    if clock == "device" and not _has_device_time(steps):
        column = "execute_us"  # the run has no device times
    time_us = steps[column].astype("f8")
    features = step_work(steps)
    of_device = waited_for(steps) if clock == "device" else np.ones(len(time_us), dtype=np.bool_)
    if of_device.sum() < MIN_STEPS:
        of_device[:] = True
    # If EngineCore collected a batch late, its device time includes host time: such steps are not fitted to.
    weights = fit_step_time(features[of_device], time_us[of_device])
    predicted_us = features @ weights
    error_us = np.abs(predicted_us - time_us)
    delay = TransportDelay.of(run, steps)
    if clock == "device" and run.header.engine.async_scheduling:
        delay = replace(delay, between_us=0.0)  # the device goes on with the next batch
    return StepCost(
        step_us=float(weights[0]),
        prefill_token_us=float(weights[1]),
        decode_us=float(weights[2]),
        kv_token_us=float(weights[3]),
        prefill_step_us=float(weights[4]),
        prefill_kv_us=float(weights[5]),
        between_us=delay.between_us,
        enter_us=delay.enter_us,
        leave_us=delay.leave_us,
        fitted=True,
        clock=clock,
        machine=f"{run.header.engine.device_name or run.header.host.cpu} ({run.header.host.cores} cores)",
        source=run.header.started_at,
        steps=len(time_us),
        error_share=float(error_us.mean() / time_us.mean()) if time_us.mean() > 0 else 0.0,
        held_out_share=_held_out(features, time_us),
        unexplained_share=_unexplained(run, steps, predicted_us, delay),
    )


def _has_device_time(steps: Table) -> bool:
    device_us = steps.get("device_us")
    return device_us is not None and bool(np.isfinite(device_us).all()) and bool(device_us.any())


def _held_out(features: NDArray[np.float64], time_us: NDArray[np.float64]) -> float:
    """Fit to the first steps and predict the rest; return the relative error of the rest's total time."""
    cut = max(int(len(time_us) * FITTED_SHARE), MIN_STEPS // 2)
    rest_us = float(time_us[cut:].sum())
    if rest_us <= 0:
        return 1.0
    return (
        abs(float((features[cut:] @ fit_step_time(features[:cut], time_us[:cut])).sum()) - rest_us) / rest_us
    )


def _unexplained(run: Run, steps: Table, predicted_us: NDArray[np.float64], delay: TransportDelay) -> float:
    """Return how far steps plus delays are from the time with requests in flight, as a share of that time.

    On a busy machine, front end and EngineCore wait for each other; neither the steps nor the median delays show this.
    """
    seconds, pieces = in_flight(run.table("requests"), float(steps["t_s"][0]))
    if seconds <= 0:
        return 0.0
    explained_us = predicted_us.sum() + len(predicted_us) * delay.between_us
    explained_us += pieces * (delay.enter_us + delay.leave_us - delay.between_us)
    return abs(seconds - float(explained_us) * 1e-6) / seconds
