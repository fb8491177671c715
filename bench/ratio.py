"""The ratio of two sides measured in pairs. Imports little: a benchmark measures with what it imports in its heap."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from kvtune.reading.analysis.spread import CONFIDENCE


def ratio(stock: ArrayLike, core: ArrayLike) -> tuple[float, float, float]:
    """core over stock: the pairs' geometric mean and its interval (Student), as (ratio, low, high)."""
    from scipy.stats import t

    logs = np.log(np.array(core) / np.array(stock))
    half = 0.0
    if len(logs) > 1:
        half = float(t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    middle = float(logs.mean())
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)
