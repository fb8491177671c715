"""A claim's figures from runs of two sides: the ratio of means, its interval, and whether the claim holds here. Pure.

One observation is a whole run, or one turn of an interleaved A/B. Intervals are at 95 %, of logarithms
(a ratio's): Welch's for runs, of the pairs' differences for turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["holds", "smaller here", "no difference shown", "does not hold here", "not measured"]

ALIKE = 0.10
"""A claimed equality holds if its interval stays within this distance of 1."""
HALF = 0.5
"""A claim holds if at least half of the published gain is reached; less is 'smaller here'."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """b over a, between `low` and `high` with 95 % confidence; None: too few runs, or a zero among them."""

    ratio: float | None
    low: float | None
    high: float | None
    runs: int


def ratio(a: Sequence[float], b: Sequence[float], *, count: bool = False, paired: bool = False) -> Ratio:
    """The ratio of geometric means. It is exact if runs do not vary; for a `count`, one run is enough."""
    runs = min(len(a), len(b))
    if count and runs == 1 and a[0] > 0:
        exact = b[0] / a[0]
        return Ratio(exact, exact, exact, runs)
    if not runs:
        return Ratio(None, None, None, 0)
    if paired and len(a) == len(b) >= 3:
        return _of_pairs(np.asarray(a, np.float64), np.asarray(b, np.float64))
    if min(*a, *b) <= 0:
        one, two = float(np.mean(a)), float(np.mean(b))
        return Ratio(two / one if one else None, None, None, runs)
    left, right = np.log(np.asarray(a)), np.log(np.asarray(b))
    middle = float(right.mean() - left.mean())
    if runs < 2:
        return Ratio(math.exp(middle), None, None, runs)
    if left.std() < 1e-12 and right.std() < 1e-12:
        return Ratio(math.exp(middle), math.exp(middle), math.exp(middle), runs)
    half = _welch_half_width(left, right)
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), runs)


def _of_pairs(a: NDArray[np.float64], b: NDArray[np.float64]) -> Ratio:
    """From pairs of turns. Where a turn has zero (no collection): of sums, with a bootstrap over pairs."""
    from scipy.stats import t

    if not a.sum():
        return Ratio(None, None, None, len(a))
    if min(a.min(), b.min()) > 0:
        each = np.log(b / a)
        middle = float(each.mean())
        half = float(t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each)))
        return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half), len(a))
    picks = np.random.default_rng(0).integers(0, len(a), (4000, len(a)))
    below = a[picks].sum(axis=1)
    low, high = np.quantile(b[picks].sum(axis=1)[below > 0] / below[below > 0], (0.025, 0.975))
    return Ratio(float(b.sum() / a.sum()), float(low), float(high), len(a))


def _welch_half_width(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Half the 95 % interval of the difference of means. scipy's own test warns where one side has no spread."""
    from scipy.stats import t

    one, two = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    freedom = (one + two) ** 2 / (one**2 / (len(a) - 1) + two**2 / (len(b) - 1))
    return float(t.ppf(0.975, freedom) * math.sqrt(one + two))


def judge(measured: Ratio, direction: str, published: float | None) -> Verdict:
    """Whether the measured ratio supports the claim."""
    if measured.ratio is None:
        return "not measured"
    if direction == "equal":
        if measured.low is None or measured.high is None:
            return "no difference shown"
        if measured.low >= 1 - ALIKE and measured.high <= 1 + ALIKE:
            return "holds"
        return "no difference shown" if measured.low <= 1 <= measured.high else "does not hold here"
    if measured.low is None or measured.high is None or measured.low <= 1 <= measured.high:
        return "no difference shown"
    size = math.log(measured.ratio) if measured.ratio > 0 else -math.inf
    gain = -size if direction == "lower" else size
    if gain <= 0:
        return "does not hold here"
    return "holds" if published is None or gain >= HALF * abs(math.log(published)) else "smaller here"


def reason(baseline: Mapping[str, Any]) -> str:
    """The most that can be gained here: the shares of the collector and of the host in a baseline run's steps."""
    collector = baseline["gc"].get("engine_core", {}).get("share_of_step")
    host, step = baseline["host_us"], baseline["step_ms"]["mean"]
    parts = []
    if collector is not None:
        parts.append(f"collections are {100 * collector:.1f} % of EngineCore's step time")
    if host["schedule"] is not None and host["update"] is not None and step:
        share = (host["schedule"] + host["update"]) / (10 * step)
        parts.append(f"schedule and update are {share:.0f} %")
    return f"in the baseline {' and '.join(parts)}: no more can be won there" if parts else ""
