"""A run in one object: what `--json` prints. Plain data, every field of the contract always there, never NaN.

Fields may be added; a changed or removed one raises `SCHEMA`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from kvtune.analysis.admission import admission
from kvtune.analysis.cache import prefix_cache, rounds
from kvtune.analysis.culprits import culprits, grown
from kvtune.analysis.gc import Collector, collectors
from kvtune.analysis.goodput import goodput
from kvtune.analysis.host import host_cost
from kvtune.analysis.latency import latency
from kvtune.analysis.leaks import pool_bytes, trends
from kvtune.analysis.ledger import Ledger, as_json, ledgers
from kvtune.analysis.memory import memory
from kvtune.analysis.verdict import verdict
from kvtune.run.states import state_dtype
from kvtune.run.types import Run
from kvtune.workload.types import Workload

SCHEMA = 1


def summary(run: Run, workload: Workload | None) -> dict[str, Any]:
    """The `--json` object of one run. Without its workload the causes of misses stay unclassified."""
    h = run.header
    times, cache, host = latency(run), prefix_cache(run, workload), host_cost(run)
    resident, ledger, order = memory(run), ledgers(run), admission(run)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "source": h.source,
        "state": h.state,
        "why": h.why,
        "model": h.model,
        "workload": {
            "name": h.workload.name,
            "spec": h.workload.spec,
            "params": h.workload.params,
            "hash": h.workload.hash,
            "requests": h.workload.requests,
        },
        "core": {
            "name": h.core.name,
            "settings": h.core.settings,
            "active": h.core.active,
            "why": h.core.why,
            "counters": h.core.counters,
            "parts": h.core.parts,
        },
        "seed": h.workload.seed,
        "engine": {
            "vllm": h.engine.vllm,
            "torch": h.engine.torch,
            "device": h.engine.device,
            "device_name": h.engine.device_name,
            "executor": h.engine.executor,
            "block_size": h.engine.block_size,
            "num_blocks": h.engine.num_blocks,
            "state_dtype": state_dtype(h.engine),
            "settings": h.engine.settings,
            "args": h.engine.args,
        },
        "python": h.python,
        "host": {
            "cpu": h.host.cpu,
            "cores": h.host.cores,
            "memory_bytes": h.host.memory_bytes,
            "os": h.host.os,
            "avx512_bf16": h.host.avx512_bf16,
        },
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
        "goodput": goodput(run),
        "ttft_ms": asdict(times.ttft_ms),
        "itl_ms": asdict(times.itl_ms),
        "e2e_ms": asdict(times.e2e_ms),
        "send_lag_ms": asdict(times.send_lag_ms),
        "preemptions": int(run.table("requests")["preemptions"].sum()),
        "rounds": [asdict(round) for round in rounds(run)],
        "prefix_cache": {
            "query_tokens": cache.query_tokens,
            "hit_tokens": cache.hit_tokens,
            "hit_rate": cache.hit_rate,
            "misses": dict(cache.misses),
        },
        "admission": None if order is None else asdict(order),
        "gc": {process: _collector(own, ledger.get(process)) for process, own in collectors(run).items()},
        "gc_steps": as_json(run),
        "culprits": {process: asdict(own) for process, own in culprits(run).items()},
        "heap_growth": {process: [asdict(row) for row in rows] for process, rows in grown(run).items()},
        "stacks": h.extra.get("stacks", {}),
        "host_us": {
            "schedule": host.schedule_us,
            "update": host.update_us,
            "per_request_step": host.per_request_step_us,
        },
        "objects_per_step": host.objects,
        "steps": host.steps,
        "step_ms": asdict(host.step_ms),
        "memory": {process: own.rss_peak_bytes for process, own in resident.items()},
        "memory_slope_bytes_s": {process: own.slope_bytes_s for process, own in resident.items()},
        "memory_trend": {process: asdict(own) for process, own in trends(run).items()},
        "pool_bytes": pool_bytes(run),
        "engine_counters": h.engine_counters,
        "probe": {"level": h.probe.level, "lost_records": h.probe.lost_records, "disabled": h.probe.disabled},
        "valid": {"timings": h.valid.timings, "why": h.valid.why},
        "notes": h.notes,
        "verdict": asdict(verdict(run, workload)),
    }
    plain: dict[str, Any] = _plain(found)
    return plain


def _collector(own: Collector, ledger: Ledger | None) -> dict[str, Any]:
    more = asdict(ledger) if ledger is not None else {}
    if "share_of_step" in more:
        more["share_by_generation"] = more.pop("share_of_step")
    return {
        **more,
        "collections": list(own.collections),
        "pause_ms": {"total": own.pause_total_ms, "max": own.pause_max_ms, "p99": own.pause_p99_ms},
        "share_of_step": own.share_of_step,
        "frozen": own.frozen,
    }


def _plain(value: Any) -> Any:
    """Only what JSON knows: text keys, Python numbers, None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
