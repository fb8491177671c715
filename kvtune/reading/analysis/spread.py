"""Summary statistics: mean, median, 99th percentile, maximum, count; 95 % intervals of differences and slopes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.base.statistics import line, t_quantile

Values = NDArray[np.float64]

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary statistics of some values; all are None if there is no value."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    max: float | None = None
    count: int = 0


def spread(values: Values) -> Spread:
    """Return the spread of the finite values."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Spread()
    p50, p99 = np.percentile(finite, [50, 99])
    return Spread(float(finite.mean()), float(p50), float(p99), float(finite.max()), len(finite))


def mean_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return Welch's interval (low, high) of mean(b) - mean(a). Each side needs at least two values.

    The width is 0 if neither side varies, as with hits of replays, whose difference is exact.
    """
    difference = float(np.mean(b)) - float(np.mean(a))
    first, two = float(np.var(a, ddof=1)) / len(a), float(np.var(b, ddof=1)) / len(b)
    if first + two == 0.0:
        return difference, difference
    freedom = (first + two) ** 2 / (first**2 / (len(a) - 1) + two**2 / (len(b) - 1))
    half = t_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(first + two)
    return difference - half, difference + half


def slope_interval(x: Values, y: Values) -> tuple[float, float, float]:
    """Fit a line by least squares. Return its slope and the slope's interval: (slope, low, high)."""
    slope, error = line(x, y)
    half = t_quantile((1 + CONFIDENCE) / 2, len(x) - 2) * error
    return slope, slope - half, slope + half
