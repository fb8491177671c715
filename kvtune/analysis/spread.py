"""Summary statistics: mean, median, 99th percentile, maximum, count; the interval of a difference of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """All None where there is no value."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    max: float | None = None
    count: int = 0


def spread(values: Values) -> Spread:
    """The spread of the finite values."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Spread()
    p50, p99 = np.percentile(finite, [50, 99])
    return Spread(float(finite.mean()), float(p50), float(p99), float(finite.max()), len(finite))


def welch_half_width(a: Sequence[float], b: Sequence[float]) -> float:
    """Half the width of Welch's interval of a difference of means; takes at least two values a side.

    0 where no side varies: hits of replays, for example, whose difference is exact. scipy's own test warns there.
    """
    from scipy.stats import t

    one, two = float(np.var(a, ddof=1)) / len(a), float(np.var(b, ddof=1)) / len(b)
    if one + two == 0.0:
        return 0.0
    freedom = (one + two) ** 2 / (one**2 / (len(a) - 1) + two**2 / (len(b) - 1))
    return float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(one + two)


def mean_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """The interval (low, high) of mean(b) - mean(a), by Welch."""
    difference, half = float(np.mean(b)) - float(np.mean(a)), welch_half_width(a, b)
    return difference - half, difference + half
