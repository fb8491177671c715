"""The record of one run, engine or sim: a header (plain data) and tables (columns of numbers).

Times in tables are seconds since the measuring phase began. Adding a field with a default keeps the schema. Changing
or removing one raises SCHEMA, and needs an upgrade in file.py and a golden file of the old schema in tests/golden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.run.extras import Extras

SCHEMA = 1

Table = dict[str, NDArray[Any]]
"""Columns of equal length by name."""

TABLES: dict[str, dict[str, str]] = {
    # One row a request, in workload order. hit_tokens: -1 where not reported. Times that were not reached are NaN.
    "requests": {
        "id": "U",
        "kind": "U",
        "round": "i4",
        "prompt_tokens": "i8",
        "output_tokens": "i8",  # received, which may be fewer than requested
        "hit_tokens": "i8",
        "tier_hit_tokens": "i8",  # of hit_tokens, those that came from a tier of host memory. 0 in older files
        "planned_s": "f8",  # NaN in a closed loop
        "sent_s": "f8",
        "first_token_s": "f8",
        "finished_s": "f8",
        "finish": "U",  # length, stop, abort, error, "" = unfinished
        "preemptions": "i4",
        "engine": "i2",  # which of several EngineCores served it (run/engines.py); 0: the only one, or not known
        "answer_crc": "i8",  # of the generated token ids as int32, equal for equal answers; 0 = no answer
    },
    # One row each time the front end received tokens of a request; `request` is the row in `requests`.
    # `made_s`: when EngineCore made the last of them, NaN where it was not recorded.
    "tokens": {"request": "i4", "t_s": "f8", "count": "i4", "made_s": "f8"},
    # One row a batch that EngineCore executed. Host parts in microseconds; `process` indexes Header.processes. With
    # asynchronous scheduling schedule_us is a later batch's, which is scheduled while the device computes this one.
    "steps": {
        "process": "i2",
        "t_s": "f8",
        "step_us": "f8",
        "schedule_us": "f8",
        "execute_us": "f8",  # dispatch and wait for the model
        "update_us": "f8",
        "cpu_us": "f8",  # CPU time of EngineCore's thread within the step
        "scheduled_tokens": "i4",
        "prefill_tokens": "i4",
        "requests": "i4",  # requests that had tokens scheduled
        "running": "i4",
        "waiting": "i4",
        "free_blocks": "i4",
        "context_tokens": "i8",  # KV tokens that the scheduled requests attend to
        # Net allocations by phase: objects that the collector watches, made minus freed, all threads. 0 in older files.
        "schedule_objects": "i4",
        "execute_objects": "i4",
        "update_objects": "i4",
        "other_objects": "i4",
        "prefill_context_tokens": "i8",  # of context_tokens, those that prefilling requests attend to
        "preempted": "i4",  # running requests that this step threw out. 0 in older files
        # EngineCore waited so long for the model's results. NaN where not recorded, as in older files.
        "wait_us": "f8",
        # The device had this batch and none before it. With asynchronous scheduling older files have the time of the
        # batch before each, and NaN here.
        "device_us": "f8",
    },
    # One row a step and queue of the pool from which cached KV blocks were evicted; `demoted` to a lower queue: in
    # older runs. Files say `tier` for a queue: it indexes Header.engine.settings["tiers"], the queues' names. `t_s` is
    # the step's start. No table: not recorded.
    "pool": {
        "process": "i2",
        "t_s": "f8",
        "tier": "i1",
        "evicted": "i4",
        "demoted": "i4",
        "free_blocks": "i4",
    },
    # One row a turn of EngineCore in which a tier of host memory copied something or had no room. A chunk is what the
    # tier keeps under one key. No table: no tier, or not recorded.
    "copies": {
        "process": "i2",
        "t_s": "f8",
        "stored_bytes": "i8",
        "store_us": "f8",
        "loaded_bytes": "i8",
        "load_us": "f8",
        "loads": "i4",  # requests whose load ended
        "wait_us": "f8",  # of requests that stopped waiting for copies
        "longest_wait_us": "f8",
        "stored_chunks": "i4",
        "reused_chunks": "i4",  # loaded for the first time since they were stored
        "evicted_chunks": "i4",
        "refused": "i4",  # stores for which the tier had no room
    },
    # One row a collection of Python's garbage collector, in any process.
    "gc": {
        "process": "i2",
        "t_s": "f8",
        "generation": "i1",
        "pause_us": "f8",
        "cpu_us": "f8",
        "collected": "i4",
        "uncollectable": "i4",
        "line": "i4",  # which of extra.ledger[process].lines set it off, counted from 1; 0: not known
    },
    # One row a psutil sample of a process. uss_bytes is 0 where it was not sampled.
    "memory": {
        "process": "i2",
        "t_s": "f8",
        "rss_bytes": "i8",
        "uss_bytes": "i8",
        "cpu_s": "f8",
        "threads": "i4",
        # Time so far in which the process's threads were ready to run and had no CPU (in each interval, of the thread
        # that waited longest). NaN where the machine does not say.
        "wait_s": "f8",
        "stopped": "i1",  # 1: a signal had stopped the process
    },
    # One row an NVML sample of a GPU; `device` indexes Header.extra.devices. No table: no GPU, or no NVML.
    "devices": {
        "device": "i2",
        "t_s": "f8",
        "busy_percent": "i2",
        "memory_bytes": "i8",
        "power_w": "f8",
        "clock_mhz": "i4",
        "pcie_sent_bytes_s": "i8",
        "pcie_received_bytes_s": "i8",
    },
    # One row each time the front end took the tokens of a step from EngineCore. No table: not recorded.
    "receipts": {"t_s": "f8"},
    # One row a look at a running server (`kvtune record`): its gauges, and its counters since it was started.
    "server": {
        "t_s": "f8",
        "running": "i4",
        "waiting": "i4",
        "pool_use": "f8",
        "query_tokens": "i8",
        "hit_tokens": "i8",
        "prompt_tokens": "i8",
        "output_tokens": "i8",
        "preemptions": "i4",
        "evicted_blocks": "i8",  # since kvtune joined
    },
}


MAY_BE_NAN = frozenset(
    (
        ("requests", "planned_s"),
        ("requests", "sent_s"),
        ("requests", "first_token_s"),
        ("requests", "finished_s"),
        ("tokens", "made_s"),
        ("steps", "wait_us"),
        ("steps", "device_us"),
        ("memory", "wait_s"),
    )
)
"""Columns of times that may not have been reached or recorded. Every other f8 is finite."""

COUNTED = {
    "requests": ("prompt_tokens", "output_tokens"),
    "tokens": ("request", "count"),
    "steps": ("process",),
    "pool": ("process", "tier"),
    "copies": ("process",),
    "gc": ("process", "line"),
    "memory": ("process",),
    "devices": ("device",),
}
"""Columns that count from 0: tokens, and rows of other tables and of the header's lists."""


class WorkloadInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    spec: str
    params: dict[str, str | int | float]
    seed: int
    hash: str
    requests: int


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: the requested core. `active`: whether it ran; `why` says why not."""

    name: Literal["kvtune", "stock"]
    settings: dict[str, Any] = {}
    active: bool = False
    why: str = ""
    counters: dict[str, int] = {}
    # Parts of the core that report whether they are in force; header.notes has the reasons of those that are not.
    parts: dict[str, bool] = {}


SETTINGS_OF_CACHE = (
    "offload",
    "hash_block_size",
    "hit_alignment_tokens",
    "retention_interval",
    "scheduler",
    "pool",
    "policy",
    "tiers",
)
"""Fields of the KV cache's description that are kept in the engine's settings."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    vllm: str = ""
    torch: str = ""
    device: str = ""  # cpu, cuda
    device_name: str = ""
    executor: str = ""
    block_size: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    async_scheduling: bool = False
    engines: int = 1  # EngineCores that share the load, each with a pool of `num_blocks`
    settings: dict[str, Any] = {}  # as resolved by vLLM
    args: list[str] = []  # as given after `--`
    # Where chunk, seats and block size come from: flag, recipe, or vLLM's default and for which device. {} in older
    # files, whose engines took vLLM's fallback in place of its server's defaults.
    origins: dict[str, str] = {}
    like_device: str = ""  # the device of --like-device; "": the machine's own
    groups: list[dict[str, Any]] = []  # KV cache groups: kind, block_size, sliding_window, layers, page_bytes
    kv_specs: dict[str, Any] = {}  # from which `sim` rebuilds this engine's KV config without the model

    def with_cache(self, cache: Mapping[str, Any]) -> EngineInfo:
        """The engine with the description of its KV cache by `probe.describe`."""
        taken = {name: cache[name] for name in SETTINGS_OF_CACHE if name in cache}
        return msgspec.structs.replace(
            self,
            num_blocks=cache.get("num_blocks", self.num_blocks),
            groups=cache.get("groups", []),
            kv_specs=cache.get("kv_specs", {}),
            settings={**self.settings, **taken},
        )


class HostInfo(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str = ""
    cores: int = 0
    memory_bytes: int = 0
    os: str = ""
    avx512_bf16: bool | None = None  # decides the data type of states (run.cpu); None in older files


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`role`: front_end, engine_core, worker, client (of a server), helper. `gc`: thresholds, frozen objects, ..."""

    pid: int
    role: str
    name: str = ""
    gc: dict[str, Any] = {}


class ProbeInfo(msgspec.Struct, frozen=True, kw_only=True):
    level: str = "off"
    lost_records: dict[str, int] = {}  # by process name: overwritten in the ring before they were read
    disabled: dict[str, str] = {}  # by process and probe: why it switched itself off


class Validity(msgspec.Struct, frozen=True, kw_only=True):
    """`timings` is False where a probe distorts times, or they are predicted; `why` says which."""

    timings: bool = True
    why: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    kvtune: str
    # engine; host: the engine on a simulated device; sim: replayed, nothing measured; server: one that was watched
    source: Literal["engine", "host", "sim", "server"]
    state: Literal["complete", "partial", "failed"] = "complete"
    why: str = ""
    started_at: str  # ISO 8601, UTC
    command: list[str]
    model: str
    model_config: dict[str, Any] = {}
    workload: WorkloadInfo
    core: CoreInfo
    engine: EngineInfo
    python: str
    host: HostInfo
    processes: list[ProcessInfo] = []
    probe: ProbeInfo = ProbeInfo()
    valid: Validity = Validity()
    wall_s: float = 0.0  # the measuring phase
    startup_s: float = 0.0
    # vLLM's own prefix-cache counters over the measuring phase: requests, queries, hits, and so on.
    engine_counters: dict[str, float] = {}
    notes: list[str] = []  # for readers of the results: count mismatches, fallbacks
    log_tail: list[str] = []
    extra: Extras = Extras()  # results that only some runs have


class RunLabel(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a header that lists of runs and plans need. Its other fields are skipped, whatever they hold."""

    source: Literal["engine", "host", "sim", "server"]
    state: Literal["complete", "partial", "failed"] = "complete"
    why: str = ""
    started_at: str
    model: str
    workload: WorkloadInfo
    core: CoreInfo
    host: HostInfo
    wall_s: float = 0.0
    startup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    header: Header
    tables: dict[str, Table] = field(default_factory=dict)

    def table(self, name: str) -> Table:
        """The table; an empty one with its columns where the run did not record it."""
        table = self.tables.get(name)
        return table if table is not None else empty_table(name)

    def with_extra(self, **changes: Any) -> Run:
        """The run with these fields of `header.extra` replaced."""
        extra = msgspec.structs.replace(self.header.extra, **changes)
        return Run(msgspec.structs.replace(self.header, extra=extra), self.tables)


def empty_table(name: str) -> Table:
    return {column: np.empty(0, dtype=kind) for column, kind in TABLES[name].items()}
