"""What a served engine tells: live traffic as a trace (KVTUNE_RECORD), counters on /metrics (KVTUNE_METRICS_DIR).

Called by vLLM in each of its processes, inert without these variables. EngineCore counts and writes; the API server
reads its counters when it is scraped. Nothing here may raise into the engine: what fails switches itself off.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Any

from kvtune.probe.status import role
from kvtune.workload.recording import PrefixHasher, TraceWriter

logger = logging.getLogger("vllm.kvtune")

COUNTERS_EVERY_S = 0.5
COUNTERS_FILE = "counters.json"

_registered_pid = 0


def register() -> None:
    """The entry point: idempotent, and inert unless a recording or counters are asked for."""
    global _registered_pid
    record, metrics = os.environ.get("KVTUNE_RECORD", ""), os.environ.get("KVTUNE_METRICS_DIR", "")
    if not (record or metrics) or _registered_pid == os.getpid():
        return
    _registered_pid = os.getpid()
    try:
        if role() == "engine_core":
            _watch_scheduler(record, metrics)
        elif role() == "front_end" and metrics:
            from prometheus_client import REGISTRY

            REGISTRY.register(CounterReader(Path(metrics) / COUNTERS_FILE))
    except Exception as error:
        logger.warning("kvtune does not record: %r", error)


def _watch_scheduler(record: str, metrics: str) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    build = Scheduler.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        try:
            Recorder(Path(record) if record else None, Path(metrics) if metrics else None).attach(self)
        except Exception as error:
            logger.warning("kvtune does not record: %r", error)

    Scheduler.__init__ = built


class Recorder:
    """Listens to one scheduler: requests as they come and as they end."""

    def __init__(self, trace: Path | None, metrics: Path | None) -> None:
        self._writer = TraceWriter(trace) if trace is not None else None
        self._hasher = PrefixHasher()
        self._counters = metrics / COUNTERS_FILE if metrics is not None else None
        self._begun = monotonic()
        self._open: dict[str, tuple[float, list[int]]] = {}
        self._due = 0.0
        self.totals = {"requests": 0, "prefix_query_tokens": 0, "prefix_hit_tokens": 0}

    def attach(self, scheduler: Any) -> None:
        """Instance attributes: the scheduler's class, which the core may have swapped, stays as it is."""
        add, free = scheduler.add_request, scheduler._free_request

        @functools.wraps(add)
        def added(request: Any) -> Any:
            result = add(request)
            self._guard(self.came, request)
            return result

        @functools.wraps(free)
        def freed(request: Any, *args: Any, **options: Any) -> Any:
            self._guard(self.ended, request)
            return free(request, *args, **options)

        scheduler.add_request, scheduler._free_request = added, freed
        self._write_counters()

    def _guard(self, do: Any, request: Any) -> None:
        try:
            do(request)
        except Exception as error:
            logger.warning("kvtune stops recording: %r", error)
            self._writer = self._counters = None

    def came(self, request: Any) -> None:
        if self._writer is not None and request.prompt_token_ids and request.request_id not in self._open:
            ids = self._hasher.hash_ids(request.prompt_token_ids)
            self._open[request.request_id] = ((monotonic() - self._begun) * 1000.0, ids)

    def ended(self, request: Any) -> None:
        totals = self.totals
        totals["requests"] += 1
        totals["prefix_query_tokens"] += request.num_prompt_tokens
        totals["prefix_hit_tokens"] += max(request.num_cached_tokens, 0)
        told = self._open.pop(request.request_id, None)
        if self._writer is not None and told is not None:
            self._writer.add(told[0], request.num_prompt_tokens, request.num_output_tokens, told[1])
        if monotonic() >= self._due:
            self._write_counters()

    def _write_counters(self) -> None:
        self._due = monotonic() + COUNTERS_EVERY_S
        if self._counters is None:
            return
        from kvtune.core.state import state

        core = state()
        totals = dict(self.totals)
        if self._writer is not None:
            totals |= {"trace_written": self._writer.written, "trace_dropped": self._writer.dropped}
        told = {"active": bool(core["active"]), "totals": totals, "core": core["counters"]}
        part = self._counters.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(told))
            part.replace(self._counters)


class CounterReader:
    """A Prometheus collector over EngineCore's counters file: what was last written, up to half a second old."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        try:
            told = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return
        yield GaugeMetricFamily(
            "kvtune_core_active", "1: kvtune's KV core runs in EngineCore", told["active"]
        )
        for name, value in told["totals"].items():
            yield CounterMetricFamily(
                f"kvtune_{name}", f"{name.replace('_', ' ')} of finished requests", value
            )
        for name, value in told["core"].items():
            yield CounterMetricFamily(f"kvtune_core_{name}", f"the core's {name.replace('_', ' ')}", value)

    def describe(self) -> Iterable[Any]:
        return ()
