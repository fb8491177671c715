"""How long a step takes by the work in it: a fit to the steps of a recorded run. Runs anywhere.

The simulator predicts steps with it (lab/device/fit.py); the account of slow tokens finds steps that took longer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtune.base.statistics import fit_not_negative
from kvtune.data.run.types import Table

FITS = 5
"""Rounds of fitting. Each weighs errors relative to the previous round's prediction and drops its outliers."""

LEAST_SPREAD = 0.02
"""Smallest spread of relative errors that the outlier test assumes, so that a run without noise keeps all steps."""

LEAST_WAIT_SHARE = 0.1
"""EngineCore waited if its wait took more than this share of a step: converting ready tokens takes some time, too."""

PREFILL_FEATURES = (1, 4, 5)
"""The columns of `step_work` that only steps with prompt tokens have."""


def waited_for(steps: Table) -> NDArray[np.bool_]:
    """Return whether EngineCore waited for the device in each step of an engine that schedules ahead."""
    waited: NDArray[np.bool_] = steps["wait_us"] > LEAST_WAIT_SHARE * steps["step_us"]
    return waited


def step_work(steps: Table) -> NDArray[np.float64]:
    """Return a row per step: 1, prompt tokens, decodes, KV tokens of decodes, 1 if it prefills, prompt x KV tokens."""
    prefill = steps["prefill_tokens"].astype("f8")
    decodes = np.maximum(steps["scheduled_tokens"] - steps["prefill_tokens"], 0).astype("f8")
    context = np.maximum(steps["context_tokens"], 0).astype("f8")
    prefills = np.maximum(steps["requests"] - decodes, 1)
    prefill_context = steps["prefill_context_tokens"].astype("f8")
    if not prefill_context.any():  # an older run file: split evenly between the requests
        prefill_context = np.where(prefill > 0, context * prefills / np.maximum(decodes + prefills, 1), 0.0)
    kv = np.maximum(context - prefill_context, 0.0)
    attended = prefill * (prefill_context + prefill / 2) / prefills
    return np.column_stack([np.ones(len(prefill)), prefill, decodes, kv, prefill > 0, attended])


def fit_step_time(work: NDArray[np.float64], time_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return microseconds per unit of each column of `work`, none negative.

    Least squares of relative errors, so that long prefills and short decodes weigh the same. Repeated without outliers
    (steps in which the machine paused), which are found among steps with prefills and among other steps separately.
    """
    scale = np.maximum(work.max(axis=0), 1e-12)
    prefills = work[:, 1] > 0
    floor_us = max(0.05 * float(np.median(time_us)), 1e-9)
    expected_us = np.maximum(time_us, floor_us)
    keep = np.ones(len(time_us), bool)
    weights = np.zeros(work.shape[1])
    for _ in range(FITS):
        rows = work[keep] / scale / expected_us[keep, None]
        weights = fit_not_negative(rows, time_us[keep] / expected_us[keep]) / scale
        expected_us = np.maximum(work @ weights, floor_us)
        rest = time_us / expected_us - 1
        for kind in (prefills, ~prefills):
            if kind.any():
                middle = np.median(rest[kind])
                spread = 1.4826 * float(np.median(np.abs(rest[kind] - middle)))
                keep[kind] = np.abs(rest[kind] - middle) <= 6 * max(spread, LEAST_SPREAD)
    return weights
