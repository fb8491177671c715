"""How long a step takes: a + b*prefill tokens + c*decodes + d*KV tokens attended to. Runs anywhere.

Fitted by non-negative least squares to a real run's step log; a simulated run that uses a fit has predicted times, one
that does not has nominal ones, and says so.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.errors import KvtuneError
from kvtune.run.types import Run

MIN_STEPS = 20
FITTED_SHARE = 0.6
"""Of the steps, in time order, that the held-out check is fitted to."""

TRUSTED_SHARE = 0.1
Clock = Literal["wall", "cpu"]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds. `error_share` is the fit's mean absolute error over the mean step, `held_out_share` how far a fit
    to the first part of the run is off the summed time of the rest: what a prediction of means may be off by."""

    step_us: float
    prefill_token_us: float
    decode_us: float
    kv_token_us: float
    fitted: bool = False
    clock: str = ""  # which time of the steps was fitted: wall, or cpu (of EngineCore's thread)
    machine: str = ""
    source: str = ""  # the run it was fitted to
    steps: int = 0
    mean_error_us: float = 0.0
    error_share: float = 0.0
    p90_error_us: float = 0.0
    held_out_share: float = 0.0
    unexplained_share: float = (
        0.0  # of the time in which requests were in flight, what the steps' costs leave over
    )

    @property
    def trusted(self) -> bool:
        """Fitted, right about steps that it was not fitted to, and about how long requests took in the run itself."""
        return self.fitted and max(self.held_out_share, self.unexplained_share) <= TRUSTED_SHARE

    def seconds(self, prefill_tokens: int, decodes: int, kv_tokens: int) -> float:
        return (
            self.step_us
            + self.prefill_token_us * prefill_tokens
            + self.decode_us * decodes
            + self.kv_token_us * kv_tokens
        ) * 1e-6


NOMINAL = StepCost(step_us=8_000.0, prefill_token_us=12.0, decode_us=60.0, kv_token_us=0.0002)
"""A round figure for one large accelerator, for replays whose times nobody reads: only the order of events matters."""


def fit(run: Run, clock: Clock | None = None, skip_share: float = 0.02) -> StepCost:
    """The cost of a step on the machine of `run`, from its steps table.

    `clock` None takes the CPU time where EngineCore's own thread computes (the `uni` executor on a CPU): on a busy
    machine wall time says more about the neighbours. The first `skip_share` of steps is warm-up.
    """
    steps = run.table("steps")
    busy = np.flatnonzero(steps["scheduled_tokens"] > 0)
    busy = busy[int(len(busy) * skip_share) :]
    if len(busy) < MIN_STEPS:
        raise KvtuneError(
            f"the run has {len(busy)} usable steps, a step cost needs {MIN_STEPS}",
            "record a longer run with `--probe light`",
        )
    if clock is None:
        clock = "cpu" if run.header.engine.device == "cpu" and run.header.engine.executor == "uni" else "wall"
    time_us = steps["cpu_us" if clock == "cpu" else "step_us"][busy].astype("f8")
    features = _features({name: column[busy] for name, column in steps.items()})
    weights = _nnls(features, time_us)
    error_us = np.abs(features @ weights - time_us)
    return StepCost(
        step_us=float(weights[0]),
        prefill_token_us=float(weights[1]),
        decode_us=float(weights[2]),
        kv_token_us=float(weights[3]),
        fitted=True,
        clock=clock,
        machine=f"{run.header.engine.device_name or run.header.host.cpu} ({run.header.host.cores} cores)",
        source=run.header.started_at,
        steps=len(busy),
        mean_error_us=float(error_us.mean()),
        error_share=float(error_us.mean() / time_us.mean()) if time_us.mean() > 0 else 0.0,
        p90_error_us=float(np.percentile(error_us, 90)),
        held_out_share=_held_out(features, time_us),
        unexplained_share=_unexplained(run, float((features @ weights).sum()) * 1e-6, steps["t_s"][busy]),
    )


def _features(steps: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    prefill = steps["prefill_tokens"].astype("f8")
    decodes = np.maximum(steps["scheduled_tokens"] - steps["prefill_tokens"], 0).astype("f8")
    return np.column_stack(
        [np.ones(len(prefill)), prefill, decodes, np.maximum(steps["context_tokens"], 0).astype("f8")]
    )


def _nnls(features: NDArray[np.float64], time_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fitted twice: steps that a pause of the machine fell into (far above the first fit) are left out."""
    from scipy.optimize import nnls

    scale = np.maximum(features.max(axis=0), 1e-12)
    weights = nnls(features / scale, time_us)[0] / scale
    rest = time_us - features @ weights
    spread = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    keep = rest <= np.median(rest) + 6 * max(spread, 1e-9)
    if keep.sum() >= MIN_STEPS and not keep.all():
        scale = np.maximum(features[keep].max(axis=0), 1e-12)
        weights = nnls(features[keep] / scale, time_us[keep])[0] / scale
    found: NDArray[np.float64] = weights
    return found


def _held_out(features: NDArray[np.float64], time_us: NDArray[np.float64]) -> float:
    """Fit the first steps, predict the rest: how far off the rest's summed time is, as a share of it."""
    cut = max(int(len(time_us) * FITTED_SHARE), MIN_STEPS // 2)
    rest_us = float(time_us[cut:].sum())
    if rest_us <= 0:
        return 1.0
    return abs(float((features[cut:] @ _nnls(features[:cut], time_us[:cut])).sum()) - rest_us) / rest_us


def _unexplained(run: Run, explained_s: float, starts_s: NDArray[np.float64]) -> float:
    """How far the steps' costs are from the time in which at least one request was in flight, as a share of it.

    A busy machine keeps front end and EngineCore waiting for each other between steps: no step shows it.
    """
    requests = run.table("requests")
    done = np.isfinite(requests["sent_s"]) & np.isfinite(requests["finished_s"])
    if not done.any():
        return 0.0
    order = np.argsort(requests["sent_s"][done])
    sent = np.maximum(requests["sent_s"][done][order], starts_s[0])
    finished = np.maximum.accumulate(requests["finished_s"][done][order])
    before = np.concatenate(([starts_s[0]], finished[:-1]))
    in_flight_s = float(np.maximum(finished - np.maximum(sent, before), 0.0).sum())
    return abs(in_flight_s - explained_s) / in_flight_s if in_flight_s > 0 else 0.0


def read_cost(text: str) -> StepCost:
    """A StepCost from JSON (what `header.extra["step_cost"]` of a run holds)."""
    try:
        return msgspec.json.decode(text, type=StepCost)
    except msgspec.DecodeError as error:
        raise KvtuneError(f"not a step cost: {error}", "give the `step_cost` object of a run") from error
