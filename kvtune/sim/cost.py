"""How long a step takes, and how long requests and answers travel between client and engine. Runs anywhere.

A cost is fitted to a real run's step log by non-negative least squares. Times of a simulated run are predictions where
its cost was fitted; with the nominal cost they mean nothing, and the run says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtune.errors import KvtuneError
from kvtune.fake_device.cost import StepCost
from kvtune.run.engines import of_engine, ranks
from kvtune.run.step_work import fit_step_time, step_work, waited_for
from kvtune.run.types import Run, Table
from kvtune.sim.delay import TransportDelay, in_flight

MIN_STEPS = 20
FITTED_SHARE = 0.6
"""Share of the steps, in time order, on which the held-out check fits; it predicts the rest."""

Clock = Literal["wall", "cpu", "device"]
"""The time of a step that is predicted: wall time, CPU time of EngineCore's thread, or the device's busy time."""

WARM_UP_SHARE = 0.02
_COLUMN: dict[Clock, str] = {"wall": "step_us", "cpu": "cpu_us", "device": "device_us"}


def fit(run: Run, clock: Clock | None = None) -> StepCost:
    """The cost of a step on the machine of `run`, from its steps table.

    `clock` None: the clock that explains more of the time in flight: wall time or, if EngineCore's own thread runs the
    model (the `uni` executor on a CPU), its CPU time, which other processes on the machine do not lengthen.
    The first steps are warm-up and left out (`WARM_UP_SHARE`). Of several engines, the first one's steps count.
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
        return _fit(
            run, used, "device"
        )  # steps overlap: what the engine needs for each is the time until the next
    own_thread = run.header.engine.device == "cpu" and run.header.engine.executor == "uni"
    costs = [_fit(run, used, kind) for kind in (("wall", "cpu") if own_thread else ("wall",))]
    return min(costs, key=lambda cost: max(cost.held_out_share, cost.unexplained_share))


def _fit(run: Run, steps: Table, clock: Clock) -> StepCost:
    column = _COLUMN[clock]
    if clock == "device" and not _has_device_time(steps):
        column = "execute_us"  # an older file
    time_us = steps[column].astype("f8")
    features = step_work(steps)
    of_device = waited_for(steps) if clock == "device" else np.ones(len(time_us), dtype=np.bool_)
    if of_device.sum() < MIN_STEPS:
        of_device[:] = True
    # Where EngineCore came late for a batch, the device's time ends when it came: the host would count twice.
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
        mean_error_us=float(error_us.mean()),
        error_share=float(error_us.mean() / time_us.mean()) if time_us.mean() > 0 else 0.0,
        p90_error_us=float(np.percentile(error_us, 90)),
        held_out_share=_held_out(features, time_us),
        unexplained_share=_unexplained(run, steps, predicted_us, delay),
    )


def _has_device_time(steps: Table) -> bool:
    device_us = steps.get("device_us")
    return device_us is not None and bool(np.isfinite(device_us).all()) and bool(device_us.any())


def _held_out(features: NDArray[np.float64], time_us: NDArray[np.float64]) -> float:
    """Fit to the first steps, predict the rest: the error of the rest's summed time, as a share of it."""
    cut = max(int(len(time_us) * FITTED_SHARE), MIN_STEPS // 2)
    rest_us = float(time_us[cut:].sum())
    if rest_us <= 0:
        return 1.0
    return (
        abs(float((features[cut:] @ fit_step_time(features[:cut], time_us[:cut])).sum()) - rest_us) / rest_us
    )


def _unexplained(run: Run, steps: Table, predicted_us: NDArray[np.float64], delay: TransportDelay) -> float:
    """How far the sum of steps and delays is from the time with a request in flight, as a share of that time.

    On a busy machine front end and EngineCore wait for each other, which no step and no median shows.
    """
    seconds, pieces = in_flight(run.table("requests"), float(steps["t_s"][0]))
    if seconds <= 0:
        return 0.0
    explained_us = predicted_us.sum() + len(predicted_us) * delay.between_us
    explained_us += pieces * (delay.enter_us + delay.leave_us - delay.between_us)
    return abs(seconds - float(explained_us) * 1e-6) / seconds
