"""Reads vLLM's objects in the front end: counters, when tokens arrived, which engine serves a request.

A vLLM stat logger sums vLLM's own counters, to compare them with kvtune's, and keeps the times of its calls.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypedDict

from kvtune.base.files import appending, replacing
from kvtune.plugin.vllm.names import preemptions
from kvtune.plugin.vllm.patches import in_place_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


LOOKUPS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
"""What vLLM counts of its prefix cache."""


class Counts(TypedDict, total=False):
    """Content of the file that `VllmCounts.write` writes. `preemptions`: how many, by request."""

    counters: dict[str, float]
    preemptions: dict[str, int]


class Routes:
    """Notes which EngineCore each request was sent to; stays empty if there is only one."""

    def __init__(self, client: Any) -> None:
        self._engine_of: dict[str, int] = {}
        self._engines = list(getattr(client, "core_engines", ()))
        if len(self._engines) < 2 or not hasattr(client, "get_core_engine_for_request"):
            return

        @in_place_of(client, "get_core_engine_for_request")
        def noted(choose: Callable[[Any], object], request: Any) -> object:
            chosen = choose(request)
            self._engine_of[request.external_req_id or request.request_id] = self._engines.index(chosen)
            return chosen

    def reset(self) -> None:
        self._engine_of.clear()

    def write(self, path: Path) -> None:
        if self._engine_of:
            with replacing(path) as part:
                part.write(json.dumps(self._engine_of).encode())


class TierHits:
    """Notes each request's prompt tokens from a host-memory tier: vLLM's outputs have only the sum of pool and tier.

    In the front end. It reads each step's outputs just before vLLM processes them.
    """

    def __init__(self, output_processor: Any) -> None:
        self.by_request: dict[str, int] = {}

        @in_place_of(output_processor, "process_outputs")
        def noting(
            process: Callable[..., object], outputs: Sequence[Any], *args: object, **options: object
        ) -> object:
            for output in outputs:
                stats = output.prefill_stats
                if stats is not None and stats.num_external_cached_tokens:
                    state = output_processor.request_states.get(output.request_id)
                    if state is not None:
                        self.by_request[state.external_req_id] = stats.num_external_cached_tokens
            return process(outputs, *args, **options)


def read_counts(path: Path) -> Any:
    """Return what `Routes.write` (each request's engine) or `VllmCounts.write` wrote; {} if there is no such file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


class VllmCounts:
    """Sums of vLLM's scheduler and request statistics since `reset`.

    `receipts`: when the front end received steps' tokens (monotonic ns); only times that are not written yet.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(
            (
                *LOOKUPS,
                "tier_queries",
                "tier_hits",
                "finished",
                "prompt_tokens",
                "generation_tokens",
                "e2e_s",
            ),
            0,
        )
        self.preemptions: dict[str, int] = {}
        self.receipts = array("q")

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        c = self.counters
        if scheduler is not None:
            stats = scheduler.prefix_cache_stats
            for name in LOOKUPS:
                c[name] += getattr(stats, name)
            tier = scheduler.connector_prefix_cache_stats
            if tier is not None:
                c["tier_queries"] += tier.queries
                c["tier_hits"] += tier.hits
        if iteration is not None:  # a message without tokens has none
            self.receipts.append(monotonic_ns())
            c["generation_tokens"] += iteration.num_generation_tokens
            for request in iteration.finished_requests:
                c["finished"] += 1
                c["prompt_tokens"] += request.num_prompt_tokens
                c["e2e_s"] += request.e2e_latency
                if preempted := preemptions(request):
                    self.preemptions[str(request.request_id)] = preempted

    def write(self, path: Path) -> None:
        with replacing(path) as part:
            part.write(json.dumps({"counters": self.counters, "preemptions": self.preemptions}).encode())

    def write_receipts(self, path: Path) -> None:
        """Append the times since the last call to the file, so that a crash loses only later ones."""
        with appending(path) as file:
            file.write(self.receipts.tobytes())
        self.receipts = array("q")

    def factory(self) -> type[StatLoggerBase]:
        """Return a logger class for vLLM's StatLoggerManager; the loggers of all engines add to these counts."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counts = self

        class Feed(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
                pass

            def record(
                self,
                scheduler_stats: SchedulerStats | None,
                iteration_stats: IterationStats | None,
                mm_cache_stats: MultiModalCacheStats | None = None,
                engine_idx: int = 0,
            ) -> None:
                counts.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Feed
