"""The summary of a run: the object that `--json` prints. Plain data; every field is always present, never NaN.

A new field keeps `SCHEMA`; a changed or removed field needs a higher one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from kvtune.data.run.types import CoreInfo, EngineInfo, HostInfo, ProbeInfo, Run, Validity, WorkloadInfo
from kvtune.data.tally import Tally
from kvtune.reading.analysis.again import served_with, with_remedy
from kvtune.reading.analysis.cache import Round
from kvtune.reading.analysis.memory import DeviceUse, KvBytes
from kvtune.reading.analysis.replayed import beside, brings, helping, needs, tried
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.spread import Spread
from kvtune.reading.analysis.verdict import Verdict

SCHEMA = 1
LARGE = ("groups", "kv_specs")
"""Facts of the engine that only the run file has."""

Summary = dict[str, Any]
"""The `--json` object of one run, as `summary` returns it."""
Fields = dict[str, Any]


class TallyWithRate(Tally, frozen=True, kw_only=True):
    hit_rate: float | None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a Summary. Those that `summary` does not compute have the same names in the run or its analysis."""

    schema: int
    source: Literal["engine", "host", "sim", "server"]
    state: Literal["complete", "partial", "failed"]
    why: str
    model: str
    workload: WorkloadInfo
    core: CoreInfo
    seed: int
    engine: EngineInfo
    python: str
    host: HostInfo
    kvtune: str
    started_at: str
    startup_s: float
    requests: int
    finished: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float | None
    throughput_tok_s: float | None
    prompt_tok_s: float | None
    requests_s: float | None
    goodput: Fields | None
    ttft_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    send_lag_ms: Spread
    preemptions: int
    preempted: Fields | None
    rounds: list[Round]
    prefix_cache: TallyWithRate
    offload: Fields | None
    fleet: Fields | None
    gc: dict[str, Fields]
    stalls: Fields
    gc_steps: Fields
    culprits: dict[str, Fields]
    stacks: Any
    host_us: dict[Literal["schedule", "update", "per_request_step"], Any]
    overlap: Fields | None
    ceiling: Fields | None
    objects_per_step: Any
    steps: int
    step_ms: Spread
    memory: dict[str, float | None]
    memory_slope_bytes_s: dict[str, float | None]
    memory_trend: dict[str, Fields]
    pool_bytes: int | None
    kv_bytes: KvBytes | None
    devices: list[DeviceUse]
    engine_counters: dict[str, float | None]
    probe: ProbeInfo
    valid: Validity
    notes: list[str]
    verdict: Verdict
    beside: Any
    replayed: Fields | None


def summary(analysis: RunAnalysis) -> Summary:
    run, h, host, cache = analysis.run, analysis.run.header, analysis.host_cost, analysis.prefix_cache
    computed: Fields = {
        "schema": SCHEMA,
        "seed": h.workload.seed,
        "engine": {name: getattr(h.engine, name) for name in h.engine.__struct_fields__ if name not in LARGE},
        "preemptions": int(run.table("requests")["preemptions"].sum()),
        "preempted": analysis.preemption,
        "prefix_cache": TallyWithRate(*msgspec.structs.astuple(cache), hit_rate=cache.rate),
        "gc": analysis.collectors,
        "gc_steps": analysis.collections_in_steps,
        "stacks": h.extra.stacks,
        "host_us": {
            "schedule": host.schedule_us,
            "update": host.update_us,
            "per_request_step": host.per_request_step_us,
        },
        "objects_per_step": host.objects,
        "memory": {process: m.rss_peak_bytes for process, m in analysis.memory.items()},
        "memory_slope_bytes_s": {process: m.slope_bytes_s for process, m in analysis.memory.items()},
        "memory_trend": {process: m.trend for process, m in analysis.memory.items()},
        "beside": beside(run),
        "replayed": _replayed(run),
    }
    sources = (analysis.latency, h, host, analysis)
    for name in RunSummary.__struct_fields__:
        if name not in computed:
            computed[name] = next(getattr(source, name) for source in sources if hasattr(source, name))
    return {name: _plain(computed[name]) for name in RunSummary.__struct_fields__}


def _replayed(run: Run) -> dict[str, Any] | None:
    """Return the replays with other settings: those that help, each with its command, and those `without_effect`."""
    replayed = run.header.extra.replayed
    if replayed is None:
        return None
    best = helping(replayed)
    others = [remedy for remedy in tried(replayed) if remedy not in best]
    return {
        **msgspec.to_builtins(replayed),
        "remedies": [
            {
                **msgspec.to_builtins(remedy),
                "brings": brings(remedy, replayed),
                "needs": needs(remedy),
                "command": with_remedy(run, remedy),
                "serve": served_with(run, remedy),
            }
            for remedy in best
        ],
        "without_effect": msgspec.to_builtins(others),
    }


def _plain(value: Any) -> Any:
    """Convert to JSON types: text keys, Python numbers, None for numbers that are not finite."""
    if hasattr(value, "plain"):
        value = value.plain()
    elif isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
