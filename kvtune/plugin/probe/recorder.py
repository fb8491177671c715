"""Records a served engine: its traffic as a trace (KVTUNE_RECORD), its counters on /metrics (KVTUNE_METRICS_DIR).

`register` runs in each of vLLM's processes and does nothing without these variables. EngineCore counts and writes, the
API server reads the counters when /metrics is scraped. Nothing here may raise into the engine: the recorder
switches itself off at its first failure.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NotRequired, TypedDict
from zlib import crc32

import msgspec

from kvtune.base.files import replacing
from kvtune.base.legal import Value
from kvtune.base.scratch import leave, share, sweep
from kvtune.plugin.probe.recording import Line, PrefixHasher, TraceWriter
from kvtune.plugin.probe.status import role
from kvtune.plugin.vllm.patches import in_place_of
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import PrefillStats, Request, Scheduler

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger("vllm.kvtune")

PART = "probe.recorder"
PAGE = ".counters"
READ_ATTEMPTS = 20
BATCH_S = 0.1
"""Seconds that finished requests wait at most, while others run, before they are written."""
MOST_WAITING = 256
"""The most finished requests that may wait."""

TOTALS = ("requests", "prefix_query_tokens", "prefix_hit_tokens", "tier_hit_tokens")
"""Counters of finished requests. Hits are in the KV cache's pool; `tier_hit_tokens` came from a tier of host memory."""


def register() -> None:
    """Start recording in this process. vLLM's entry point; idempotent, and inert without the two variables."""
    record, metrics = os.environ.get("KVTUNE_RECORD", ""), os.environ.get("KVTUNE_METRICS_DIR", "")
    if not (record or metrics) or STATE.recorded_by == os.getpid():
        return
    STATE.recorded_by = os.getpid()
    try:
        if role() == "engine_core":
            watch_scheduler(record, metrics)
        elif role() == "front_end" and metrics:
            from prometheus_client import REGISTRY

            lock = use(Path(metrics))
            atexit.register(leave, Path(metrics), lock)
            REGISTRY.register(CounterReader(Path(metrics)))
    except Exception as error:
        logger.warning("kvtune: recording is off: %r", error)


def watch_scheduler(record: str, metrics: str) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def built(scheduler: Scheduler) -> None:
        try:
            Recorder(Path(record) if record else None, counted(metrics)).attach(scheduler)
        except Exception as error:
            logger.warning("kvtune: recording is off: %r", error)

    STATE.patches.undo(PART)
    STATE.patches.after(PART, Scheduler, "__init__", built)


def use(folder: Path) -> int:
    """Make or share the counters' folder, and return a lock for `leave`. Removes folders that killed servers left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    return share(folder)


def counted(metrics: str) -> Path | None:
    """Return the folder for EngineCore's counters; None if none is asked for or it cannot be used.

    Recording goes on without counters.
    """
    if not metrics:
        return None
    try:
        use(Path(metrics))
    except OSError as error:
        logger.warning("kvtune: no counters on /metrics: %s; name a folder that does not exist", error)
        return None
    return Path(metrics)


class Recorder:
    """Records one scheduler's requests from arrival to end.

    A request that ends is only put on a list. Hashing, writing and counting wait until no request runs, for `BATCH_S`
    at most: in batches this costs a tenth.
    """

    def __init__(self, trace: Path | None, metrics: Path | None) -> None:
        self._writer = TraceWriter(trace) if trace is not None else None
        self._hasher = PrefixHasher()
        self._page = CounterPage(metrics / f"{os.getpid()}{PAGE}") if metrics is not None else None
        self._started = self._written = monotonic()
        self._open: dict[str, tuple[float, PrefillStats]] = {}
        self._ended: list[tuple[float, PrefillStats, Request]] = []
        self._hashed_tokens = 0
        self._failed = False
        self.totals = dict.fromkeys(TOTALS, 0)

    def attach(self, scheduler: Scheduler) -> None:
        """Wrap methods of this scheduler object, not of its class, which the core may have replaced."""

        @in_place_of(scheduler, "add_request")
        def added(add: Callable[[Request], object], request: Request) -> object:
            self._guard(self.arrived, request)
            return add(request)

        @in_place_of(scheduler, "_free_request")
        def freed(free: Callable[..., object], request: Request, *args: object, **options: object) -> object:
            self._guard(self.ended, request)
            return free(request, *args, **options)

        self._hashed_tokens = int(getattr(scheduler, "hash_block_size", 0))
        self._write_counters()

    def _guard(self, do: Callable[[Request], None], request: Request) -> None:
        if self._failed:
            return
        try:
            do(request)
        except Exception as error:
            logger.warning("kvtune: recording stops: %r", error)
            self._failed = True
            self._open.clear()
            self._ended.clear()

    def arrived(self, request: Request) -> None:
        """Keep the request's prefill statistics: vLLM fills them in later, then removes them from the request."""
        if request.request_id not in self._open:  # else: more of a streamed prompt
            assert request.prefill_stats is not None
            self._open[request.request_id] = (monotonic(), request.prefill_stats)

    def ended(self, request: Request) -> None:
        arrival = self._open.pop(request.request_id, None)
        if arrival is None:
            return
        self._ended.append((*arrival, request))
        if not self._open or monotonic() - self._written > BATCH_S or len(self._ended) >= MOST_WAITING:
            self._write()

    def _write(self) -> None:
        queried = hit = tier_hit = 0
        rows, hash_ids, started = [], self._hasher.hash_ids, self._started
        for at_s, prefill, request in self._ended:
            queried += request.num_prompt_tokens
            hit += prefill.num_local_cached_tokens
            tier_hit += prefill.num_external_cached_tokens
            if self._writer is not None and (tokens := request.prompt_token_ids):
                ids = hash_ids(tokens, request.block_hashes, self._hashed_tokens)
                at_ms = round((at_s - started) * 1000.0, 3)
                rows.append(Line(at_ms, len(tokens), request.num_output_tokens, ids))
        totals = self.totals
        totals["requests"] += len(self._ended)
        totals["prefix_query_tokens"] += queried
        totals["prefix_hit_tokens"] += hit
        totals["tier_hit_tokens"] += tier_hit
        self._ended.clear()
        if self._writer is not None:
            self._writer.add(rows)
        self._write_counters()
        self._written = monotonic()

    def _write_counters(self) -> None:
        if self._page is None:
            return
        from kvtune.data.knobs import changed_settings
        from kvtune.plugin.core.state import active, counters, state

        totals = dict(self.totals)
        if self._writer is not None:
            totals |= {"trace_written": self._writer.written, "trace_dropped": self._writer.dropped}
        settings = changed_settings(state()["settings"])
        self._page.write({"active": active(), "totals": totals, "core": counters(), "settings": settings})


class Counters(TypedDict):
    """`active`: whether the core runs. `totals` count finished requests, `core` are the core's counters.

    `settings`: those of the core that are not its defaults.
    """

    active: bool
    totals: dict[str, int]
    core: dict[str, int]
    settings: NotRequired[dict[str, Value]]


class CounterPage:
    """One EngineCore's counters as JSON in a memory-mapped file: a write is a memory copy and survives a crash.

    A checksum precedes the text, so that a reader knows to read again where the page is being written.
    """

    HEAD = struct.Struct("<II")
    BYTES = 1 << 14

    def __init__(self, path: Path) -> None:
        with replacing(path) as part:
            part.write(bytes(self.BYTES))
            part.flush()
            self._memory = mmap.mmap(part.fileno(), self.BYTES)

    def write(self, counters: Counters) -> None:
        text = msgspec.json.encode(counters)
        whole = self.HEAD.pack(len(text), crc32(text)) + text
        if len(whole) <= self.BYTES:
            self._memory[: len(whole)] = whole

    @classmethod
    def read(cls, path: Path) -> Counters | None:
        """Return the counters; None if no complete page can be read."""
        for _ in range(READ_ATTEMPTS):
            with suppress(OSError, struct.error, msgspec.DecodeError):
                whole = path.read_bytes()
                length, checksum = cls.HEAD.unpack_from(whole)
                text = whole[cls.HEAD.size : cls.HEAD.size + length]
                if crc32(text) == checksum:
                    return msgspec.json.decode(text, type=Counters)
        return None


class CounterReader:
    """A Prometheus collector that sums the counters of this server's EngineCores at each scrape."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        pages = [page for page in map(CounterPage.read, sorted(self._folder.glob(f"*{PAGE}"))) if page]
        if not pages:
            return
        active = all(page["active"] for page in pages)
        yield GaugeMetricFamily("kvtune_core_active", "1: kvtune's KV core runs in EngineCore", active)
        text = msgspec.json.encode(pages[0].get("settings", {})).decode()
        gauge = GaugeMetricFamily(
            "kvtune_core_settings", "The core's settings that are not its defaults", labels=["settings"]
        )
        gauge.add_metric([text], 1.0)
        yield gauge
        for name, value in _sums(page["totals"] for page in pages).items():
            yield CounterMetricFamily(
                f"kvtune_{name}", f"{name.replace('_', ' ')} of finished requests", value
            )
        for name, value in _sums(page["core"] for page in pages).items():
            yield CounterMetricFamily(f"kvtune_core_{name}", f"the core's {name.replace('_', ' ')}", value)

    def describe(self) -> Iterable[Metric]:
        return ()


def _sums(tables: Iterable[dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for table in tables:
        for name, value in table.items():
            sums[name] = sums.get(name, 0) + value
    return sums
