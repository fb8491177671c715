"""What a served engine tells: live traffic as a trace (KVTUNE_RECORD), counters on /metrics (KVTUNE_METRICS_DIR).

Called by vLLM in each of its processes, inert without these variables. EngineCore counts and writes; the API server
reads its counters when it is scraped. Nothing here may raise into the engine: what fails switches itself off.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from kvtune.probe.status import role
from kvtune.run.scratch import PREFIX, hold, sweep
from kvtune.workload.recording import Line, PrefixHasher, TraceWriter

logger = logging.getLogger("vllm.kvtune")

PAGE = ".counters"
READ_ATTEMPTS = 20
BATCH_S = 0.1
MOST_WAITING = 256

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

            lock = _use(Path(metrics))
            atexit.register(_leave, Path(metrics), lock)
            REGISTRY.register(CounterReader(Path(metrics)))
    except Exception as error:
        logger.warning("kvtune does not record: %r", error)


def _watch_scheduler(record: str, metrics: str) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    build = Scheduler.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        try:
            if metrics:
                _use(Path(metrics))
            Recorder(Path(record) if record else None, Path(metrics) if metrics else None).attach(self)
        except Exception as error:
            logger.warning("kvtune does not record: %r", error)

    Scheduler.__init__ = built


def _use(folder: Path) -> int:
    """Make the folder of counters, or join those who use it; folders that killed servers left are removed."""
    sweep(folder.parent, f"{PREFIX}serve-*")
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # swept between the two: it is made again
            return hold(folder)


def _leave(folder: Path, lock: int) -> None:
    """At a front end's exit: the folder goes with the last of its users."""
    os.close(lock)
    sweep(folder.parent, folder.name)


class Recorder:
    """Listens to one scheduler: requests as they come and as they end.

    Between steps it only notes who ended. What is to be hashed, written and counted waits until nothing runs, or for
    `BATCH_S` at most while requests go on coming and ending: a tenth of the work, done at once.
    """

    def __init__(self, trace: Path | None, metrics: Path | None) -> None:
        self._writer = TraceWriter(trace) if trace is not None else None
        self._hasher = PrefixHasher()
        self._page = CounterPage(metrics / f"{os.getpid()}{PAGE}") if metrics is not None else None
        self._begun = self._written = monotonic()
        self._open: dict[str, tuple[float, Any]] = {}
        self._ended: list[tuple[float, Any, Any]] = []
        self._hashed_tokens = 0
        self._broken = False
        self.totals = {"requests": 0, "prefix_query_tokens": 0, "prefix_hit_tokens": 0}

    def attach(self, scheduler: Any) -> None:
        """Instance attributes: the scheduler's class, which the core may have swapped, stays as it is."""
        add, free = scheduler.add_request, scheduler._free_request

        @functools.wraps(add)
        def added(request: Any) -> Any:
            self._guard(self.came, request)
            return add(request)

        @functools.wraps(free)
        def freed(request: Any, *args: Any, **options: Any) -> Any:
            self._guard(self.ended, request)
            return free(request, *args, **options)

        self._hashed_tokens = int(getattr(scheduler, "hash_block_size", 0))
        scheduler.add_request, scheduler._free_request = added, freed
        self._tell()

    def _guard(self, do: Any, request: Any) -> None:
        if self._broken:
            return
        try:
            do(request)
        except Exception as error:
            logger.warning("kvtune stops recording: %r", error)
            self._broken = True
            self._open.clear()
            self._ended.clear()

    def came(self, request: Any) -> None:
        """vLLM fills the request's prefill statistics in, then takes them away from it: they are kept here."""
        if request.request_id not in self._open:  # else a streamed prompt goes on
            self._open[request.request_id] = (monotonic(), request.prefill_stats)

    def ended(self, request: Any) -> None:
        told = self._open.pop(request.request_id, None)
        if told is None:
            return
        self._ended.append((*told, request))
        if not self._open or monotonic() - self._written > BATCH_S or len(self._ended) >= MOST_WAITING:
            self._write()

    def _write(self) -> None:
        queried = hit = 0
        rows, hash_ids, begun = [], self._hasher.hash_ids, self._begun
        for at_s, prefill, request in self._ended:
            queried += request.num_prompt_tokens
            hit += prefill.num_local_cached_tokens
            if self._writer is not None and (tokens := request.prompt_token_ids):
                ids = hash_ids(tokens, request.block_hashes, self._hashed_tokens)
                at_ms = round((at_s - begun) * 1000.0, 3)
                rows.append(Line(at_ms, len(tokens), request.num_output_tokens, ids))
        totals = self.totals
        totals["requests"] += len(self._ended)
        totals["prefix_query_tokens"] += queried
        totals["prefix_hit_tokens"] += hit
        self._ended.clear()
        if self._writer is not None:
            self._writer.add(rows)
        self._tell()
        self._written = monotonic()

    def _tell(self) -> None:
        if self._page is None:
            return
        from kvtune.core.state import active, counters

        totals = dict(self.totals)
        if self._writer is not None:
            totals |= {"trace_written": self._writer.written, "trace_dropped": self._writer.dropped}
        self._page.write({"active": active(), "totals": totals, "core": counters()})


class CounterPage:
    """One EngineCore's counters as JSON in a memory-mapped file: a write is a copy, and survives the process.

    A sequence number that is odd while the page is written tells a reader to look again.
    """

    HEAD = struct.Struct("<QI")
    BYTES = 1 << 14

    def __init__(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_bytes(bytes(self.BYTES))
        with part.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self.BYTES)
        part.replace(path)
        self._sequence = 0

    def write(self, told: dict[str, Any]) -> None:
        text = msgspec.json.encode(told)
        at = self.HEAD.size
        if len(text) > self.BYTES - at:
            return
        self.HEAD.pack_into(self._memory, 0, self._sequence + 1, len(text))
        self._memory[at : at + len(text)] = text
        self._sequence += 2
        self.HEAD.pack_into(self._memory, 0, self._sequence, len(text))

    @classmethod
    def read(cls, path: Path) -> dict[str, Any] | None:
        """None where there is nothing to read (yet)."""
        for _ in range(READ_ATTEMPTS):
            try:
                whole = path.read_bytes()
                sequence, length = cls.HEAD.unpack_from(whole)
                told = msgspec.json.decode(whole[cls.HEAD.size : cls.HEAD.size + length])
                with path.open("rb") as file:
                    again, _ = cls.HEAD.unpack(file.read(cls.HEAD.size))
            except (OSError, struct.error, msgspec.DecodeError):
                continue
            if sequence == again and not sequence % 2:
                return told if isinstance(told, dict) else None
        return None


class CounterReader:
    """A Prometheus collector over the pages of all EngineCores of this server: sums, current when scraped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        pages = [told for path in sorted(self._folder.glob(f"*{PAGE}")) if (told := CounterPage.read(path))]
        if not pages:
            return
        active = all(page["active"] for page in pages)
        yield GaugeMetricFamily("kvtune_core_active", "1: kvtune's KV core runs in EngineCore", active)
        for name, value in _sums(page["totals"] for page in pages).items():
            yield CounterMetricFamily(
                f"kvtune_{name}", f"{name.replace('_', ' ')} of finished requests", value
            )
        for name, value in _sums(page["core"] for page in pages).items():
            yield CounterMetricFamily(f"kvtune_core_{name}", f"the core's {name.replace('_', ' ')}", value)

    def describe(self) -> Iterable[Any]:
        return ()


def _sums(tables: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for table in tables:
        for name, value in table.items():
            found[name] = found.get(name, 0) + value
    return found
