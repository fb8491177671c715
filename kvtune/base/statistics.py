"""The few statistics that comparisons need, in numpy: a test holds each to scipy's values. Pure.

scipy itself would be a third of what kvtune installs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Rows = NDArray[np.int64]

TINY = 1e-300
CLOSE = 1e-15
STEPS = 500
ROUNDS = 10
"""Most rounds of a fit, for each of its columns."""


def t_quantile(share: float, freedom: float) -> float:
    """Return the value below which `share` (above a half) of Student's t distribution lies."""
    x = beta_quantile(2 * (1 - share), freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - x) / x)


def beta_quantile(share: float, a: float, b: float) -> float:
    """Return the value below which `share` of the beta distribution lies."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if beta_share(middle, a, b) < share else (low, middle)
    return (low + high) / 2


def beta_share(x: float, a: float, b: float) -> float:
    """Return the share of the beta distribution below x (the regularized incomplete beta function)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges below this point only
        return 1.0 - beta_share(1.0 - x, b, a)
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log) * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1.0 / _not_zero(1.0 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _not_zero(1.0 + term * d)
            c = _not_zero(1.0 + term / c)
            value *= d * c
        if abs(d * c - 1.0) < CLOSE:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY


def share_interval(hits: int, tries: int, confidence: float) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) interval of a binomial share."""
    tail = (1 - confidence) / 2
    low = beta_quantile(tail, hits, tries - hits + 1) if hits else 0.0
    high = beta_quantile(1 - tail, hits + 1, tries - hits) if hits < tries else 1.0
    return low, high


def line(x: Values, y: Values) -> tuple[float, float]:
    """Fit a line by least squares. Return its slope and the slope's standard error; NaN if x does not vary."""
    dx, dy = x - x.mean(), y - y.mean()
    width = float(dx @ dx)
    if not width:
        return math.nan, math.nan
    slope = float(dx @ dy) / width
    rest = dy - slope * dx
    return slope, math.sqrt(float(rest @ rest) / (len(x) - 2) / width)


def bootstrap(
    samples: Sequence[Rows],
    statistic: Callable[..., Values],
    *,
    resamples: int,
    batch: int,
    confidence: float,
    seed: int,
) -> tuple[float, float]:
    """Return the percentile interval of a statistic whose samples are drawn again, with replacement.

    `statistic` takes one array of draws (draws, rows) for each sample and returns a value for each draw.
    """
    random = np.random.default_rng(seed)
    values: list[Values] = []
    for start in range(0, resamples, batch):
        draws = min(batch, resamples - start)
        drawn = [rows[random.integers(0, len(rows), (draws, len(rows)))] for rows in samples]
        values.append(statistic(*drawn, axis=-1))
    tail = 50 * (1 - confidence)
    low, high = np.percentile(np.concatenate(values), [tail, 100 - tail])
    return float(low), float(high)


def fit_not_negative(work: Values, wanted: Values) -> Values:
    """Return the least-squares weights of the columns of `work`, none negative (Lawson and Hanson's method)."""
    columns = work.shape[1]
    weights = np.zeros(columns)
    free, blocked = np.zeros(columns, bool), np.zeros(columns, bool)
    tolerance = 10 * max(work.shape) * np.finfo(float).eps * float(np.abs(work).sum(axis=0).max(initial=0.0))
    for _ in range(ROUNDS * columns):
        pull = work.T @ (wanted - work @ weights)
        pull[free | blocked] = -np.inf
        best = int(np.argmax(pull))
        if (free | blocked).all() or pull[best] <= tolerance:
            break
        free[best] = True
        tried = _among(free, work, wanted)
        if tried[best] <= 0:  # only rounding pulled it up
            free[best], blocked[best] = False, True
            continue
        while (below := free & (tried <= 0)).any():
            # Go only as far as the first weight that would turn negative, and hold that one at 0.
            parts = np.full(columns, np.inf)
            parts[below] = weights[below] / (weights[below] - tried[below])
            weights = weights + parts.min() * (tried - weights)
            free[parts <= parts.min()] = False
            weights[~free] = 0.0
            tried = _among(free, work, wanted)
        weights = tried
        blocked[:] = False
    return weights


def _among(free: NDArray[np.bool_], work: Values, wanted: Values) -> Values:
    """Return the least-squares weights of the columns that are `free`; the others have 0."""
    weights = np.zeros(work.shape[1])
    weights[free] = np.linalg.lstsq(work[:, free], wanted, rcond=None)[0]
    return weights


def fisher(marked: int, chosen: int, both: int, total: int) -> float:
    """Return the probability that at least `both` of `chosen` things are `marked`, if they are chosen at random."""
    ways = (math.comb(marked, k) * math.comb(total - marked, chosen - k) for k in range(both, chosen + 1))
    return sum(ways) / math.comb(total, chosen)
