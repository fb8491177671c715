"""What each switch is worth: runs with it turned over against the baseline's, with intervals over the repeats. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvtune.analysis.compare import CONFIDENCE
from kvtune.analysis.gc import collectors
from kvtune.analysis.host import host_cost
from kvtune.analysis.memory import memory
from kvtune.run.types import Run

Verdict = Literal["better", "worse", "no difference shown", "too few runs"]

FIGURES = ("collections", "pause_ms", "step_ms", "host_us_per_request_step", "rss_growth_bytes_s")
"""All of the whole engine (every process); of all of them less is better."""


@dataclass(frozen=True, slots=True)
class Worth:
    """One figure of a variant. `difference` is the variant less the baseline, `low` to `high` at 95 %."""

    figure: str
    baseline: float | None
    value: float | None
    difference: float | None
    low: float | None
    high: float | None
    verdict: Verdict


def figures(run: Run) -> dict[str, float | None]:
    """One number a run for each of FIGURES; None where the run cannot say."""
    found = collectors(run).values()
    host = host_cost(run)
    slopes = [m.slope_bytes_s for m in memory(run).values() if m.slope_bytes_s is not None]
    return {
        "collections": float(sum(sum(c.collections) for c in found)),
        "pause_ms": sum(c.pause_total_ms for c in found),
        "step_ms": host.step_ms.mean,
        "host_us_per_request_step": host.per_request_step_us,
        "rss_growth_bytes_s": float(sum(slopes)) if slopes else None,
    }


def ablation(baseline: Sequence[Run], turned: Mapping[str, Sequence[Run]]) -> dict[str, tuple[Worth, ...]]:
    """By variant, in the given order."""
    base = [figures(run) for run in baseline]
    return {
        name: tuple(_worth(figure, base, [figures(run) for run in runs]) for figure in FIGURES)
        for name, runs in turned.items()
    }


def _worth(
    figure: str, base: Sequence[Mapping[str, float | None]], other: Sequence[Mapping[str, float | None]]
) -> Worth:
    a = [value for run in base if (value := run[figure]) is not None]
    b = [value for run in other if (value := run[figure]) is not None]
    one = float(np.mean(a)) if a else None
    two = float(np.mean(b)) if b else None
    difference = two - one if one is not None and two is not None else None
    if min(len(a), len(b)) < 2:
        return Worth(figure, one, two, difference, None, None, "too few runs")
    low, high = _interval(a, b)
    verdict: Verdict = "better" if high < 0 else "worse" if low > 0 else "no difference shown"
    return Worth(figure, one, two, difference, low, high, verdict)


def _interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Welch's, as repeated runs are compared everywhere; exact where no run differs from its like."""
    from scipy.stats import ttest_ind

    if len(set(a)) == len(set(b)) == 1:
        return b[0] - a[0], b[0] - a[0]
    found = ttest_ind(b, a, equal_var=False).confidence_interval(confidence_level=CONFIDENCE)
    return float(found.low), float(found.high)
