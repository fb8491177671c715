"""The summary of a run: the object that `--json` prints. Plain data; every field is always present, never NaN.

A new field keeps `SCHEMA`; a changed or removed field needs a higher one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from kvtune.analysis.again import served_with, with_remedy
from kvtune.analysis.offload import Offload
from kvtune.analysis.replayed import beside, brings, helping, needs, tried
from kvtune.analysis.run import RunAnalysis
from kvtune.run.types import Run

SCHEMA = 1
LARGE = ("groups", "kv_specs")
"""Facts of the engine that only the run file has."""

Summary = dict[str, Any]
"""The `--json` object of one run, as `summary` returns it."""


def summary(analysis: RunAnalysis) -> Summary:
    run, h = analysis.run, analysis.run.header
    times, cache, host = analysis.latency, analysis.prefix_cache, analysis.host_cost
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "source": h.source,
        "state": h.state,
        "why": h.why,
        "model": h.model,
        "workload": h.workload,
        "core": h.core,
        "seed": h.workload.seed,
        "engine": {name: getattr(h.engine, name) for name in h.engine.__struct_fields__ if name not in LARGE},
        "python": h.python,
        "host": h.host,
        "kvtune": h.kvtune,
        "started_at": h.started_at,
        "startup_s": h.startup_s,
        "requests": times.requests,
        "finished": times.finished,
        "prompt_tokens": times.prompt_tokens,
        "output_tokens": times.output_tokens,
        "wall_s": times.wall_s,
        "throughput_tok_s": times.throughput_tok_s,
        "prompt_tok_s": times.prompt_tok_s,
        "requests_s": times.requests_s,
        "goodput": analysis.goodput,
        "ttft_ms": asdict(times.ttft_ms),
        "itl_ms": asdict(times.itl_ms),
        "e2e_ms": asdict(times.e2e_ms),
        "send_lag_ms": asdict(times.send_lag_ms),
        "preemptions": int(run.table("requests")["preemptions"].sum()),
        "preempted": None if analysis.preemption is None else analysis.preemption.plain(),
        "rounds": analysis.rounds,
        "prefix_cache": {**msgspec.to_builtins(cache), "hit_rate": cache.rate},
        "offload": _offload(analysis.offload),
        "fleet": None if analysis.fleet is None else analysis.fleet.plain(),
        "gc": {process: collector.plain() for process, collector in analysis.collectors.items()},
        "stalls": asdict(analysis.stalls),
        "gc_steps": analysis.collections_in_steps.plain(),
        "culprits": {process: asdict(rows) for process, rows in analysis.culprits.items()},
        "stacks": msgspec.to_builtins(h.extra.stacks),
        "host_us": {
            "schedule": host.schedule_us,
            "update": host.update_us,
            "per_request_step": host.per_request_step_us,
        },
        "overlap": None if analysis.overlap is None else asdict(analysis.overlap),
        "ceiling": None if analysis.ceiling is None else asdict(analysis.ceiling),
        "objects_per_step": host.objects,
        "steps": host.steps,
        "step_ms": asdict(host.step_ms),
        "memory": {process: m.rss_peak_bytes for process, m in analysis.memory.items()},
        "memory_slope_bytes_s": {process: m.slope_bytes_s for process, m in analysis.memory.items()},
        "memory_trend": {process: asdict(m.trend) for process, m in analysis.memory.items()},
        "pool_bytes": analysis.pool_bytes,
        "kv_bytes": None if analysis.kv_bytes is None else asdict(analysis.kv_bytes),
        "devices": [asdict(device) for device in analysis.devices],
        "engine_counters": h.engine_counters,
        "probe": h.probe,
        "valid": h.valid,
        "notes": h.notes,
        "verdict": asdict(analysis.verdict),
        "beside": beside(run),
        "replayed": _replayed(run),
    }
    plain: dict[str, Any] = _plain(fields)
    return plain


def _offload(tier: Offload | None) -> dict[str, Any] | None:
    if tier is None:
        return None
    return {**asdict(tier), "tier_hit_rate": tier.tier_hit_rate, "computed_share": tier.computed_share}


def _replayed(run: Run) -> dict[str, Any] | None:
    """Return the replays with other settings: those that help, each with its command, and those `without_effect`."""
    told = run.header.extra.replayed
    if told is None:
        return None
    best = helping(told)
    others = [one for one in tried(told) if one not in best]
    return {
        **msgspec.to_builtins(told),
        "remedies": [
            {
                **msgspec.to_builtins(one),
                "brings": brings(one, told),
                "needs": needs(one),
                "command": with_remedy(run, one),
                "serve": served_with(run, one),
            }
            for one in best
        ],
        "without_effect": msgspec.to_builtins(others),
    }


def _plain(value: Any) -> Any:
    """Convert to JSON types: text keys, Python numbers, None for numbers that are not finite."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
