"""The few numbers that stand for many: mean, median, 99th percentile, and how many there were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """All None where there was nothing to measure."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    max: float | None = None
    count: int = 0


def spread(values: Values) -> Spread:
    """The spread of the finite ones among `values`."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Spread()
    p50, p99 = np.percentile(finite, [50, 99])
    return Spread(float(finite.mean()), float(p50), float(p99), float(finite.max()), len(finite))
