"""Counts a step's inter-token latencies in bulk, where vLLM's Prometheus logger observes them one by one. Front end."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import Histogram

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import IterationStats

FEWEST = 8
"""A step with fewer latencies than this is left to vLLM's logger."""


def wrap_record(record: Callable[..., None]) -> Callable[..., None]:
    """Wrap PrometheusStatLogger.record, so that it counts a step's inter-token latencies at once."""

    def recorded(
        self: PrometheusStatLogger,
        scheduler_stats: object,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        amounts, histogram = list[float](), None
        with suppress(Exception):
            amounts = [] if iteration_stats is None else iteration_stats.inter_token_latencies_iter
            histogram = self.histogram_inter_token_latency.get(engine_idx)
        if iteration_stats is None or len(amounts) < FEWEST or type(histogram) is not Histogram:
            record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            return
        iteration_stats.inter_token_latencies_iter = []
        try:
            record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        finally:
            iteration_stats.inter_token_latencies_iter = amounts
        with suppress(Exception):  # counters, which no caller waits for
            for amount, times in Counter(amounts).items():
                number = bisect_left(histogram._upper_bounds, amount)
                histogram._buckets[number].inc(times)
            histogram._sum.inc(sum(amounts))

    return recorded
