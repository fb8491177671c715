"""Counts a step's inter-token latencies in bulk, where vLLM's Prometheus logger observes them one by one. Front end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import Histogram

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import IterationStats

FEWEST = 8
"""A step with fewer latencies than this is left to vLLM's logger."""


def observe_all(histogram: Histogram, amounts: Sequence[float]) -> None:
    """Observe all values, with one bucket lookup per distinct value: most latencies of a decode step are equal."""
    for amount, times in Counter(amounts).items():
        for bound, bucket in zip(histogram._upper_bounds, histogram._buckets, strict=True):
            if amount <= bound:
                bucket.inc(times)
                break
    histogram._sum.inc(sum(amounts))


def wrap_record(record: Callable[..., None]) -> Callable[..., None]:
    """Wrap PrometheusStatLogger.record, so that it counts a step's inter-token latencies at once."""

    def recorded(
        self: PrometheusStatLogger,
        scheduler_stats: object,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        histogram = None
        with suppress(Exception):
            histogram = _bulk(self, iteration_stats, engine_idx)
        if histogram is None or iteration_stats is None:
            record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            return
        amounts = iteration_stats.inter_token_latencies_iter
        iteration_stats.inter_token_latencies_iter = []
        try:
            record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        finally:
            iteration_stats.inter_token_latencies_iter = amounts
        with suppress(Exception):  # counters, which no caller waits for
            observe_all(histogram, amounts)

    return recorded


def _bulk(logger: PrometheusStatLogger, stats: IterationStats | None, engine: int) -> Histogram | None:
    """Return the histogram to which a step's latencies are added at once; None if vLLM's logger adds them."""
    amounts = () if stats is None else stats.inter_token_latencies_iter
    histogram = logger.histogram_inter_token_latency.get(engine)
    return histogram if len(amounts) >= FEWEST and type(histogram) is Histogram else None
