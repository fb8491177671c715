"""The record of one run, engine or sim: a header (plain data) and tables (columns of numbers).

Times in tables are seconds since the measuring phase began. A new field with a default keeps the schema. A changed or
removed field needs a higher SCHEMA, an upgrade in file.py, and a golden file of the old schema in tests/golden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.base.units import count
from kvtune.data.run.extras import Extras
from kvtune.data.run.ranges import Count, Number, Scalar, Seconds, Seed, Whole
from kvtune.data.tally import Hits

SCHEMA = 1

Table = dict[str, NDArray[Any]]
"""Columns of equal length by name."""

TABLES: dict[str, dict[str, str]] = {
    # One row per request, in workload order. hit_tokens: -1 where not reported. Times that were not reached are NaN.
    "requests": {
        "id": "U",
        "kind": "U",
        "round": "i4",
        "prompt_tokens": "i8",
        "output_tokens": "i8",  # received, which may be fewer than requested
        "hit_tokens": "i8",
        "tier_hit_tokens": "i8",  # the part of hit_tokens that came from host memory; 0 in older files
        "planned_s": "f8",  # NaN in a closed loop
        "sent_s": "f8",
        "first_token_s": "f8",
        "finished_s": "f8",
        "finish": "U",  # length, stop, abort, error, "" = unfinished
        "preemptions": "i4",
        "engine": "i2",  # rank of the EngineCore that served it (data/run/engines.py); 0 also where it is not known
        "answer_crc": "i8",  # CRC of the generated token ids as int32; 0 = no answer
    },
    # One row per delivery of a request's tokens to the front end; `request` is the row in `requests`.
    # `made_s`: when EngineCore made the last token of the delivery; NaN where it was not recorded.
    "tokens": {"request": "i4", "t_s": "f8", "count": "i4", "made_s": "f8"},
    # One row per batch that EngineCore executed; `process` is an index into Header.processes. With asynchronous
    # scheduling, schedule_us is the time of a later batch, scheduled while the device computes this one.
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
        # Net allocations by phase, in all threads: GC-tracked objects made minus freed. 0 in older files.
        "schedule_objects": "i4",
        "execute_objects": "i4",
        "update_objects": "i4",
        "other_objects": "i4",
        "prefill_context_tokens": "i8",  # the part of context_tokens that prefilling requests attend to
        "preempted": "i4",  # running requests that this step preempted; 0 in older files
        # How long EngineCore waited for the model's results. NaN where not recorded, as in older files.
        "wait_us": "f8",
        # Time in which the device had this batch and no earlier one. NaN in older files.
        "device_us": "f8",
    },
    # One row per step and eviction queue of the pool that lost cached KV blocks. `t_s` is the step's start. `tier` is
    # the queue, an index into its names in Header.engine.settings["tiers"]. No table: not recorded.
    "pool": {
        "process": "i2",
        "t_s": "f8",
        "tier": "i1",
        "evicted": "i4",
        "free_blocks": "i4",
    },
    # One row per turn of EngineCore in which host memory copied KV blocks or had no room for some. A chunk is the group
    # of blocks that host memory keeps under one key. No table: no host memory tier, or not recorded.
    "copies": {
        "process": "i2",
        "t_s": "f8",
        "stored_bytes": "i8",
        "store_us": "f8",
        "loaded_bytes": "i8",
        "load_us": "f8",
        "loads": "i4",  # requests whose load ended
        "wait_us": "f8",  # total wait of the requests that stopped waiting for copies
        "longest_wait_us": "f8",
        "stored_chunks": "i4",
        "reused_chunks": "i4",  # loaded for the first time since they were stored
        "evicted_chunks": "i4",
        "refused": "i4",  # stores for which the tier had no room
    },
    # One row per collection of Python's garbage collector, in any process.
    "gc": {
        "process": "i2",
        "t_s": "f8",
        "generation": "i1",
        "pause_us": "f8",
        "cpu_us": "f8",
        "collected": "i4",
        "uncollectable": "i4",
        "line": "i4",  # the line that triggered it: number (from 1) in extra.ledger[process].lines; 0: not known
    },
    # One row per psutil sample of a process. uss_bytes is 0 where it was not sampled.
    "memory": {
        "process": "i2",
        "t_s": "f8",
        "rss_bytes": "i8",
        "uss_bytes": "i8",
        "cpu_s": "f8",
        "threads": "i4",
        # Total time so far in which a thread of the process was ready to run and had no CPU: in each interval, that of
        # the thread that waited longest. NaN where the machine does not report it.
        "wait_s": "f8",
        "stopped": "i1",  # 1: a signal had stopped the process
    },
    # One row per NVML sample of a GPU; `device` is an index into Header.extra.devices. No table: no GPU, or no NVML.
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
    # One row per step whose tokens the front end received from EngineCore. No table: not recorded.
    "receipts": {"t_s": "f8"},
    # One row per reading of a running server's metrics (`kvtune record`): gauges, and counters since its start.
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
        # Sums of the server's histograms since its start; 0 and NaN in older files.
        "steps": "i8",  # engine steps that gave a token
        "step_tokens": "i8",  # tokens computed in these steps
        "first_tokens": "i8",  # requests that got their first token
        "first_token_s": "f8",  # their seconds until then
        "gaps": "i8",  # tokens after the first
        "gap_s": "f8",  # seconds between tokens
        "answered": "i8",  # requests that ended
        "queue_s": "f8",  # their seconds in the queue, in prefill, in decode
        "prefill_s": "f8",
        "decode_s": "f8",
    },
    # One row from one reading of a running server's metrics to the next, or to a later one in a long recording: counts
    # of what came in between, and the largest gauges. NaN: the server does not publish it.
    "looks": {
        "t_s": "f8",
        "until_s": "f8",
        "lost": "i4",  # readings in between that failed: when the counts came is not known
        "restarts": "i4",  # the counts are then since the server's start
        "running": "f8",
        "waiting": "f8",
        "pool_use": "f8",
        "query_tokens": "f8",
        "hit_tokens": "f8",
        "output_tokens": "f8",
        "came": "f8",  # requests: those answered, and the growth of those that run or wait
        "answered": "f8",
        "first_tokens": "f8",  # requests that got their first token
        "first_token_s": "f8",  # their seconds until then
        "queued": "f8",  # requests that ended, and the seconds that they were in the queue
        "queue_s": "f8",
        "stalled_s": "f8",  # seconds in which no token was generated while requests ran
        "preemptions": "i8",
        "evicted_blocks": "i8",
    },
    # The missed tokens of `looks`, by cause; `look` is the row there.
    "look_misses": {"look": "i4", "cause": "U", "tokens": "i8"},
    # The server's histograms of `looks`: how many requests took longer than `above_s`, and `upto_s` at most (NaN: no
    # bound). `what`: first_token, queue.
    "look_times": {"look": "i4", "what": "U", "above_s": "f8", "upto_s": "f8", "count": "i8"},
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
        *(("server", name) for name in ("first_token_s", "gap_s", "queue_s", "prefill_s", "decode_s")),
        *(
            ("looks", name)
            for name, kind in TABLES["looks"].items()
            if kind == "f8" and name not in ("t_s", "until_s")
        ),
        ("look_times", "upto_s"),
    )
)
"""Columns that are NaN where a time was not reached or not recorded. Every other f8 column is finite."""

BELOW_ZERO = {
    **dict.fromkeys((("requests", "round"), ("requests", "hit_tokens")), -1),
    **dict.fromkeys(
        (("steps", f"{phase}_objects") for phase in ("schedule", "execute", "update", "other")), -(1 << 31)
    ),
}
"""The least value of the columns of whole numbers that may be below 0. All others are counts, indices and sizes."""
AT_MOST = {("gc", "generation"): 2}
"""The largest value of these columns. That of the others is the largest of their type, at most LARGEST."""


class WorkloadInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    spec: str
    params: dict[str, str | Whole | Number]
    seed: Seed
    hash: str
    requests: Count


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: the requested core. `active`: whether it ran; `why`: the reason if it did not."""

    name: Literal["kvtune", "stock"]
    settings: dict[str, Any] = {}
    active: bool = False
    why: str = ""
    counters: dict[str, Whole] = {}
    # Parts of the core, and whether each is active; header.notes has the reasons for inactive parts.
    parts: dict[str, bool] = {}

    @classmethod
    def reported(
        cls,
        name: Literal["kvtune", "stock"],
        settings: dict[str, Any],
        state: Mapping[str, Any] | None,
        workers: Sequence[Mapping[str, Any]] = (),
    ) -> CoreInfo:
        """Return what EngineCore's core said of itself (`CoreState`); a part is on only if all workers have it on."""
        if name == "stock":
            return cls(name=name, settings=settings)
        if not state:
            why = "the engine did not say (probe off, or it died before a step)"
            return cls(name=name, settings=settings, why=why)
        parts = {
            part: active and all(worker["parts"].get(part, True) for worker in workers)
            for part, active in state["parts"].items()
        }
        reported = {field: state[field] for field in ("active", "why", "counters")}
        return cls(name=name, settings=state["settings"] or settings, parts=parts, **reported)


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
"""Fields of the KV cache's description that `with_cache` adds to the engine's settings."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    vllm: str = ""
    torch: str = ""
    device: str = ""  # cpu, cuda
    device_name: str = ""
    executor: str = ""
    block_size: Count = 0
    num_blocks: Count = 0
    max_model_len: Count = 0
    async_scheduling: bool = False
    engines: Count = 1  # EngineCores that share the load, each with a pool of `num_blocks`
    settings: dict[str, Any] = {}  # as resolved by vLLM
    args: list[str] = []  # as given after `--`
    # Sources of max_num_batched_tokens, max_num_seqs and block_size: `flag`, `recipe` or `vLLM's default for DEVICE`.
    # {} in older files, whose engines used vLLM's fallback values instead of its server's defaults. In a replay whose
    # pool a device's memory sizes, `num_blocks` says what that assumes (platforms.BY_MEMORY).
    origins: dict[str, str] = {}
    like_device: str = ""  # the device that --like-device names; "" without the option
    # KV cache groups: kind, block_size, sliding_window, layers, page_bytes (of one layer), block_bytes (of all layers)
    groups: list[dict[str, Any]] = []
    kv_specs: dict[str, Any] = {}  # `sim` rebuilds the engine's KV config from these, without the model

    @property
    def pool_bytes(self) -> int:
        """The KV pool's bytes, 0 if not known. Groups share tensors: a block is as large as the largest group's."""
        pages = [
            int(group.get("block_bytes", 0)) or int(group.get("page_bytes", 0)) * int(group.get("layers", 0))
            for group in self.groups
        ]
        return self.num_blocks * max(pages, default=0)

    @property
    def block_sizes(self) -> list[int]:
        """The tokens of a block, of each KV cache group; of the engine, if no groups are known."""
        sizes = [int(group.get("block_size") or 0) for group in self.groups]
        return sizes if sizes and all(sizes) else [self.block_size]

    @property
    def hit_unit(self) -> int:
        """Hits end at multiples of this many tokens; 0: not known."""
        unit = self.settings.get("hit_alignment_tokens")
        return unit if isinstance(unit, int) and unit > 0 else self.block_size

    @property
    def pool_tokens(self) -> int:
        """The tokens of prompts that the pool holds if each group keeps all of them."""
        sizes = self.block_sizes
        return int(self.num_blocks / sum(1 / size for size in sizes)) if all(sizes) else 0

    @property
    def pool(self) -> str:
        """The pool in words: its blocks, their tokens, and what the number assumes if no engine measured it."""
        sizes = sorted(set(self.block_sizes))
        tokens = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
        by_group = " by KV group" if len(sizes) > 1 else ""
        unit = self.settings.get("hit_alignment_tokens")
        ends = f", hits in multiples of {unit}" if by_group and unit else ""
        assumes = f", {self.origins['num_blocks']}" if "num_blocks" in self.origins else ""
        return f"{count(self.num_blocks)} blocks of {tokens} tokens{by_group}{ends}{assumes}"

    @property
    def state_dtype(self) -> str:
        """`float32`, `bfloat16`, and so on: of recurrent states; "" without states or without KV specs.

        A state's last (and largest) tensor is the recurrent one, whose data type the platform chooses.
        """
        for spec in self.kv_specs.get("specs", []):
            dtypes = spec.get("fields", {}).get("dtypes")
            if dtypes:
                last = list(dtypes.get("$tuple", []))[-1:]
                return str(last[0].get("$dtype", "")) if last else ""
        return ""

    def with_cache(self, cache: Mapping[str, Any]) -> EngineInfo:
        """Return the engine with its KV cache's description (by `probe.describe`) added."""
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
    cores: Count = 0
    memory_bytes: Count = 0
    os: str = ""
    avx512_bf16: bool | None = (
        None  # decides the data type of recurrent states (base/cpu.py); None in older files
    )


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`role`: front_end, engine_core, worker, client (of a server), helper. `gc`: thresholds, frozen objects, ..."""

    pid: Count
    role: str
    name: str = ""
    gc: dict[str, Any] = {}


class ProbeInfo(msgspec.Struct, frozen=True, kw_only=True):
    level: str = "off"
    lost_records: dict[
        str, Count
    ] = {}  # by process name: records overwritten in the ring buffer before they were read
    disabled: dict[str, str] = {}  # by process and probe: why it switched itself off


class Validity(msgspec.Struct, frozen=True, kw_only=True):
    """`timings` is False where a probe distorts times, or they are predicted; `why` says which."""

    timings: bool = True
    why: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    schema: Count = SCHEMA
    kvtune: str
    # engine: measured; host: the engine on a simulated device; sim: replayed, not measured; server: a running server
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
    wall_s: Seconds = 0.0  # the measuring phase
    startup_s: Seconds = 0.0
    # vLLM's own prefix-cache counters over the measuring phase: requests, queries, hits, and so on.
    engine_counters: dict[str, Number] = {}
    notes: list[str] = []  # for readers of the results: count mismatches, fallbacks
    log_tail: list[str] = []
    extra: Extras = Extras()  # results that only some runs have


class LabelExtras(msgspec.Struct, frozen=True, kw_only=True):
    step_cost: dict[str, Scalar] = {}


class RunLabel(msgspec.Struct, frozen=True, kw_only=True):
    """The header fields that lists of runs and duration estimates need. Other fields are skipped unchecked."""

    source: Literal["engine", "host", "sim", "server"]
    state: Literal["complete", "partial", "failed"] = "complete"
    why: str = ""
    started_at: str
    model: str
    workload: WorkloadInfo
    core: CoreInfo
    host: HostInfo
    wall_s: Seconds = 0.0
    startup_s: Seconds = 0.0
    extra: LabelExtras = LabelExtras()


NOMINAL = "a nominal step cost: only the order of events means anything"


def untimed(header: Header | RunLabel) -> str:
    """Return the reason why a run has no times; "" if it has. A replay has times if its step cost was fitted."""
    return NOMINAL if header.source == "sim" and not header.extra.step_cost.get("fitted", False) else ""


@dataclass(frozen=True, slots=True)
class Run:
    header: Header
    tables: dict[str, Table] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        """Whether its files are for this user alone: a server's recording, or texts of prompts."""
        texts = self.header.extra.texts
        return self.header.source == "server" or (texts is not None and texts.with_text)

    def table(self, name: str) -> Table:
        """Return the table, or an empty one with the same columns if the run did not record it."""
        table = self.tables.get(name)
        return table if table is not None else empty_table(name)

    def with_extra(self, **changes: Any) -> Run:
        """Return the run with these fields of `header.extra` replaced."""
        extra = msgspec.structs.replace(self.header.extra, **changes)
        return Run(msgspec.structs.replace(self.header, extra=extra), self.tables)


def empty_table(name: str) -> Table:
    return {column: np.empty(0, dtype=kind) for column, kind in TABLES[name].items()}


def table_of(name: str, columns: Mapping[str, Any]) -> Table:
    """Return the table of these columns, equally long; those that are not given are 0."""
    zero = np.zeros(len(next(iter(columns.values()))))
    return {column: np.array(columns.get(column, zero), kind) for column, kind in TABLES[name].items()}


def table_of_rows(name: str, rows: Sequence[Sequence[Any]]) -> Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(TABLES[name])
    return {
        column: np.array(v, kind) for (column, kind), v in zip(TABLES[name].items(), columns, strict=True)
    }


def hits_of(requests: Table, rows: NDArray[Any] | slice = slice(None)) -> Hits:
    """Return the hits of these rows of a table `requests`, which needs only `prompt_tokens` and `hit_tokens`."""
    prompt, hit = queries(requests)
    return Hits(int(prompt[rows].sum()), int(hit[rows].sum()))


def queries(requests: Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return prompt and hit tokens of each request; both are 0 if the engine did not report the request's hits."""
    counted = requests["hit_tokens"] >= 0
    prompt = np.where(counted, requests["prompt_tokens"], 0).astype(np.int64)
    return prompt, np.where(counted, np.minimum(requests["hit_tokens"], prompt), 0).astype(np.int64)
