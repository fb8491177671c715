"""The figures that two runs are compared by, and the observations that each is made of. Pure.

A figure is a path into the summary (`ttft_ms.mean`). Its interval comes from resampling the observations. A figure with
only one value per run needs repeated runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.types import Run
from kvtune.reading.analysis.figures import quantity
from kvtune.reading.analysis.latency import e2e_ms, token_gaps_ms, ttft_ms

Columns = tuple[NDArray[np.float64], ...]
"""One run's observations, one per row, in one or two columns of equal length (NaN: not observed)."""

STRETCHES = 100

_TIMED = re.compile(r"(^|_)(ms|us|s)(_|$)|^(goodput|verdict)$|^share_(of_step|by_generation)$")

Statistic = Callable[..., Any]
"""A function that computes the figure from columns (and `axis=`)."""


@dataclass(frozen=True, slots=True)
class Measure:
    """`observe` is None for a figure with one value per run. `paired`: row i of both runs is the same request."""

    path: str
    observe: Callable[[Run], Columns] | None = None
    statistic: Statistic | None = None
    paired: bool = True
    fewest: int = 8  # with fewer observations there is no interval
    events: bool = False  # a count of events, whose standard deviation is its square root

    @property
    def better(self) -> int:
        """-1 if less is better, 1 if more is better."""
        return quantity(self.path).better

    @property
    def timed(self) -> bool:
        """Whether it is made of times: not compared if a probe distorted the run's times."""
        return is_timed(self.path)


def is_timed(path: str) -> bool:
    """Whether a field of the summary is a time or a rate, by its name: `ttft_ms.mean`, `throughput_tok_s`."""
    return any(_TIMED.search(name) for name in path.split("."))


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    ratio: NDArray[np.float64] = np.sum(part, axis=axis) / np.sum(whole, axis=axis)
    return ratio


def _hits(run: Run) -> Columns:
    requests = run.table("requests")
    counted = requests["hit_tokens"] >= 0
    prompt = requests["prompt_tokens"].astype(np.float64)
    return np.where(counted, np.minimum(requests["hit_tokens"], prompt), np.nan), np.where(
        counted, prompt, np.nan
    )


def _tier_hits(run: Run) -> Columns:
    hits, prompt = _hits(run)
    return np.where(np.isfinite(hits), run.table("requests")["tier_hit_tokens"], np.nan), prompt


def _token_gaps(run: Run) -> Columns:
    sums, counts = token_gaps_ms(run)
    return np.where(counts > 0, sums, np.nan), np.where(counts > 0, counts, np.nan)


def _host(run: Run) -> Columns:
    """Sum over stretches of consecutive steps: a step depends on its neighbours, a stretch hardly does."""
    steps = run.table("steps")
    busy = (steps["requests"] > 0) & np.isfinite(steps["schedule_us"]) & np.isfinite(steps["update_us"])
    cost = (steps["schedule_us"] + steps["update_us"])[busy].astype(np.float64)
    requests = steps["requests"][busy].astype(np.float64)
    starts = np.unique(np.linspace(0, len(cost), STRETCHES, endpoint=False).astype(np.int64))
    if not len(cost):
        return cost, requests
    return np.add.reduceat(cost, starts), np.add.reduceat(requests, starts)


def _of_requests(name: str, observe: Callable[[Run], NDArray[np.float64]]) -> tuple[Measure, ...]:
    def columns(run: Run) -> Columns:
        return (observe(run),)

    return (
        Measure(f"{name}.mean", columns, np.mean),
        Measure(f"{name}.p50", columns, partial(np.percentile, q=50)),
        Measure(f"{name}.p99", columns, partial(np.percentile, q=99), fewest=200),
    )


MEASURES = (
    *_of_requests("ttft_ms", ttft_ms),
    Measure("itl_ms.mean", _token_gaps, _ratio),
    Measure("itl_ms.p99"),
    *_of_requests("e2e_ms", e2e_ms),
    Measure("throughput_tok_s"),
    Measure("goodput.requests_s"),
    Measure("prefix_cache.hit_rate", _hits, _ratio),
    Measure("offload.tier_hit_rate", _tier_hits, _ratio),
    Measure("offload.copies.stored_bytes"),
    Measure("offload.copies.loaded_bytes"),
    Measure("offload.copies.wait_s"),
    Measure("host_us.per_request_step", _host, _ratio, paired=False),
    Measure("ceiling.tokens_s"),
    Measure("ceiling.cpu_us_per_token.engine_core"),
    Measure("ceiling.cpu_us_per_token.front_end"),
    Measure("gc.engine_core.collections_total", events=True),
    Measure("gc.engine_core.pause_ms.total"),
    Measure("gc.engine_core.pause_ms.max"),
    Measure("memory.engine_core"),
)
