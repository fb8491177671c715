"""Repeated runs of two settings: which differences are larger than those between runs of one setting. Pure.

One observation is a whole run's figure, so the interval (Welch, 95 %) covers the machine's drift between runs, which
the intervals of `compare` do not. Interleave the runs: A, B, A, B.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtune.analysis.comparison.compare import (
    ONE_RUN,
    OTHER_TRAFFIC,
    Comparison,
    Figure,
    Mismatch,
    distorted,
    judged,
    mismatches,
    other_traffic,
    value_at,
)
from kvtune.analysis.comparison.measures import MEASURES, Measure
from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.spread import mean_difference
from kvtune.analysis.summary import Summary, summary
from kvtune.run.types import Run

FEWEST = 2
"""Fewest runs of each setting; with fewer the spread is unknown. Few runs give wide intervals."""


def compare_repeats(
    a: Sequence[Run], b: Sequence[Run], summaries: tuple[Sequence[Summary], Sequence[Summary]] | None = None
) -> Comparison:
    """Compare two sides with several runs each. All runs are checked against the first run of `a`."""
    differing: dict[str, Mismatch] = {}
    for run in (*a[1:], *b):
        for mismatch in mismatches(a[0], run):
            differing.setdefault(mismatch.field, mismatch)
    left, right = summaries or ([summary(RunAnalysis(run)) for run in side] for side in (a, b))
    why = next((text for run in (*a, *b) if (text := distorted(run))), "")
    traffic = OTHER_TRAFFIC if any(other_traffic(a[0], run) for run in (*a[1:], *b)) else ""
    figures = []
    for m in MEASURES:
        one = [value for s in left if (value := value_at(s, m.path)) is not None]
        two = [value for s in right if (value := value_at(s, m.path)) is not None]
        if one or two:
            figures.append(repeated(m, one, two, traffic or (why if m.timed else "")))
    return Comparison(tuple(differing.values()), tuple(figures))


def repeated(m: Measure, a: Sequence[float], b: Sequence[float], why: str = "") -> Figure:
    """Return the figure with its verdict, from one value per run. `why`: the reason if these values are not judged."""
    one = float(np.mean(a)) if a else None
    two = float(np.mean(b)) if b else None
    fewest = min(len(a), len(b))
    if why or fewest < FEWEST:
        return judged(m, one, two, None, None, why or (ONE_RUN if fewest == 1 else "no run of a side has it"))
    return judged(m, one, two, *mean_difference(a, b))
