"""Reads a work folder into a Run: request log, rings, status files and samples, all on one clock.

The run's clock starts with the workload. Records from before (start-up, warm-up) and after its end are left out. A run
that ended early ends with its last step or token, so that the shutdown is not part of it. A missing file is no error:
an engine that died leaves only what it had written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.base.masking import without_secrets
from kvtune.data.run.machine import origin
from kvtune.data.run.types import (
    CoreInfo,
    EngineInfo,
    Header,
    ProbeInfo,
    ProcessInfo,
    Run,
    Table,
    Validity,
)
from kvtune.lab.engine.culprits import instruments
from kvtune.lab.engine.device import DeviceSampler
from kvtune.lab.engine.driver import read_request_log
from kvtune.lab.engine.faults import compiled_note, tail
from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.messages import (
    COUNTS_FILE,
    LOG_FILE,
    REQUESTS_FILE,
    ROUTES_FILE,
    HostPlan,
    Served,
)
from kvtune.lab.engine.process import Sample
from kvtune.lab.engine.rings import (
    ProcessRing,
    devices_table,
    memory_table,
    read_rings,
    receipts_table,
    ring_tables,
)
from kvtune.lab.engine.vllm_counts import Counts, read_counts
from kvtune.plugin.core.state import CoreState, merged
from kvtune.plugin.probe.records import Step
from kvtune.plugin.probe.status import CacheFacts, ProcessFacts, read_statuses
from kvtune.plugin.vllm.parts import unknown
from kvtune.requests.types import Workload

DISTORTING = {
    "types": "the census of young objects stops the process at sampled collections",
}


def record(
    folder: Path,
    plan: HostPlan,
    workload: Workload,
    outcome: HostOutcome,
    *,
    command: Sequence[str],
    probe_level: str,
    decided: Mapping[str, str],
) -> Run:
    """Build the run from the files in `folder` and `launch`'s `outcome`. `decided` becomes `EngineInfo.origins`."""
    statuses = read_statuses(folder)
    samples = outcome.sampler.samples if outcome.sampler is not None else []
    process_rings = read_rings(folder, {s["pid"]: i for i, s in enumerate(statuses)})
    served = read_request_log(folder / REQUESTS_FILE)
    if outcome.start_ns and not outcome.end_ns:
        outcome = replace(outcome, end_ns=_last_measured_ns(outcome.start_ns, process_rings, served))
    processes = processes_of(statuses, samples, outcome)
    index = {p.pid: i for i, p in enumerate(processes)}
    counts: Counts = read_counts(folder / COUNTS_FILE)
    rings = ring_tables(process_rings, outcome)
    names = {i: f"{p.role}:{p.pid}" for i, p in enumerate(processes)}
    tables: dict[str, Table] = {"steps": rings.steps, "gc": rings.gc, "pool": rings.pool}
    tables["requests"], tables["tokens"] = _request_tables(served, workload, counts, outcome)
    routes: dict[str, int] = read_counts(folder / ROUTES_FILE)
    engines = [routes.get(str(i), 0) for i in range(len(workload.requests))]
    tables["requests"]["engine"] = np.array(engines, "i2")
    tables["memory"] = memory_table(samples, index, outcome)
    gpus = outcome.sampler.devices if outcome.sampler is not None else DeviceSampler()
    if gpus.samples:
        tables["devices"] = devices_table(gpus.samples, outcome)
    tables["receipts"] = receipts_table(folder, outcome)
    engine_cores = [s for s in statuses if s["role"] == "engine_core"]
    engine_core = next(iter(engine_cores), ProcessFacts())
    if "offload" in engine_core.get("cache", {}):
        tables["copies"] = rings.copies
    state = merged([s["core"] for s in engine_cores if s.get("core")])
    worker_states = [s["core"] for s in statuses if s["role"] == "worker" and s.get("core")]
    counters = dict(counts.get("counters", {}))
    header = Header(
        **origin(command, outcome.error.message if outcome.error is not None else ""),
        source="host" if plan.device is not None else "engine",
        started_at=outcome.started_at,
        model=plan.setup.model,
        model_config=outcome.engine.get("model_config", {}),
        workload=workload.info,
        core=CoreInfo.reported(plan.setup.core, plan.setup.core_settings, state, worker_states),
        engine=msgspec.structs.replace(
            _engine(outcome.engine, engine_core.get("cache", {}), without_secrets(plan.setup.engine_args)),
            engines=max(1, len(engine_cores)),
            origins=dict(decided),
        ),
        processes=processes,
        probe=ProbeInfo(
            level=probe_level,
            lost_records={names[i]: n for i, n in rings.lost.items() if n},
            disabled={
                f"{s['role']}:{s['pid']}:{name}": why
                for s in statuses
                for name, why in s.get("disabled", {}).items()
            },
        ),
        valid=Validity(timings=probe_level not in DISTORTING, why=DISTORTING.get(probe_level, "")),
        wall_s=max(0, outcome.end_ns - outcome.start_ns) / 1e9,
        startup_s=max(0, (outcome.start_ns or outcome.end_ns) - outcome.launched_ns) / 1e9,
        engine_counters=counters,
        notes=outcome.notes
        + [
            f"{names[i]}: {n} records left out, the clock went back in them"
            for i, n in rings.backwards.items()
        ]
        + compiled_note(_log(folder))
        + gpus.note(str(outcome.engine.get("device", "")))
        + _disagreements(tables["requests"], counters)
        + _core_notes(str(outcome.engine.get("vllm", "")), [*([state] if state else []), *worker_states]),
        log_tail=tail(_log(folder)),
        extra=msgspec.structs.replace(
            instruments(folder, process_rings, index, statuses, outcome),
            digests=rings.digests,
            computed_twice=rings.computed_twice,
            devices=gpus.names,
            gpus=gpus.facts,
        ),
    )
    return Run(header, tables)


def _last_measured_ns(start_ns: int, rings: Sequence[ProcessRing], log: Sequence[Served]) -> int:
    """Return when the last step ended or the front end received the last token, whichever is later."""
    steps = (
        record.start_ns + record.step_ns
        for ring in rings
        for record in ring.records
        if isinstance(record, Step) and not record.clock_went_back
    )
    tokens = (int(np.frombuffer(served.times, "i8")[-1]) for served in log if served.times)
    return max(start_ns, max(steps, default=0), max(tokens, default=0))


def _core_notes(version: str, states: Sequence[CoreState]) -> list[str]:
    """Return the notes of all processes' cores, and a note if kvtune does not know this version of vLLM."""
    notes = list(dict.fromkeys(note for state in states for note in state["notes"]))
    about = unknown(version) if version else ""
    return notes if not about or any(note.startswith(about) for note in notes) else [about, *notes]


def _engine(facts: dict[str, Any], cache: CacheFacts, args: Sequence[str]) -> EngineInfo:
    fields = {k: v for k, v in facts.items() if k != "model_config"}
    return msgspec.convert({**fields, "args": list(args)}, EngineInfo).with_cache(cache)


def _request_tables(
    log: Sequence[Served], workload: Workload, counts: Counts, outcome: HostOutcome
) -> tuple[Table, Table]:
    planned, zero = workload.requests, outcome.start_ns
    served, preemptions = {s.index: s for s in log}, counts.get("preemptions", {})
    rows = [served.get(i) or Served(i, 0, 0, -1, 0, "", b"", b"") for i in range(len(planned))]
    requests: Table = {
        "id": np.array([r.id for r in planned], dtype=np.str_),
        "kind": np.array([r.kind for r in planned], dtype=np.str_),
        "round": np.array([r.round for r in planned], "i4"),
        "prompt_tokens": np.array([r.prompt_tokens for r in planned], "i8"),
        "output_tokens": np.array([s.output_tokens for s in rows], "i8"),
        "hit_tokens": np.array([s.hit_tokens for s in rows], "i8"),
        "tier_hit_tokens": np.array([s.tier_hit_tokens for s in rows], "i8"),
        "planned_s": np.array([np.nan if r.arrival_s is None else r.arrival_s for r in planned]),
        "sent_s": _since(zero, [s.sent_ns for s in rows]),
        "first_token_s": _since(zero, [int.from_bytes(s.times[:8], "little") for s in rows]),
        "finished_s": _since(zero, [s.finished_ns for s in rows]),
        "finish": np.array([s.finish for s in rows], dtype=np.str_),
        "preemptions": np.array([preemptions.get(str(s.index), 0) for s in rows], "i4"),
        "answer_crc": np.array([s.answer_crc for s in rows], "i8"),
    }
    deliveries = np.array([len(s.times) // 8 for s in rows], "i8")
    no_time = np.array(np.nan).tobytes()
    made = b"".join(s.made or no_time * n for s, n in zip(rows, deliveries.tolist(), strict=True))
    tokens: Table = {
        "request": np.arange(len(rows), dtype="i4").repeat(deliveries),
        "t_s": (np.frombuffer(b"".join(s.times for s in rows), "i8") - zero) / 1e9,
        "count": np.frombuffer(bytearray().join(s.counts for s in rows), "i4"),
        "made_s": np.frombuffer(made, "f8") - zero / 1e9,
    }
    return requests, tokens


def _since(zero_ns: int, times_ns: Sequence[int]) -> NDArray[np.float64]:
    """Return these times in seconds since `zero_ns`; NaN for 0, what did not happen."""
    happened_ns = np.array(times_ns, "i8")
    return np.where(happened_ns != 0, (happened_ns - zero_ns) / 1e9, np.nan)


def _disagreements(requests: Table, counters: dict[str, float]) -> list[str]:
    """Return a note for each count in which the front end and vLLM's own counters differ."""
    if not counters:
        return ["vLLM's own counters were not received: ours are not checked against them"]
    done = np.isfinite(requests["finished_s"])
    counted = requests["hit_tokens"] >= 0
    hits, from_host = (requests[name][counted].sum() for name in ("hit_tokens", "tier_hit_tokens"))
    ours = (
        ("hits", "prefix-cache hit tokens", int(hits - from_host)),
        ("tier_hits", "tokens that host memory gave back", int(from_host)),
        ("finished", "finished requests", int(done.sum())),
        ("prompt_tokens", "prompt tokens of finished requests", int(requests["prompt_tokens"][done].sum())),
        ("generation_tokens", "generated tokens", int(requests["output_tokens"].sum())),
    )
    return [
        f"{what}: the front end counted {value}, vLLM {int(counters[name])}"
        for name, what, value in ours
        if name in counters and value != int(counters[name])
    ]


def _log(folder: Path) -> str:
    path = folder / LOG_FILE
    return path.read_text(errors="replace") if path.exists() else ""


def processes_of(
    statuses: list[ProcessFacts], samples: Sequence[Sample], outcome: HostOutcome
) -> list[ProcessInfo]:
    """Return processes with a status file, then others that psutil saw while measuring (helpers, trackers)."""
    names = outcome.sampler.names if outcome.sampler is not None else {}
    reporting = [
        ProcessInfo(pid=s["pid"], role=s["role"], name=s.get("name", ""), gc={**s.get("gc", {})})
        for s in statuses
    ]
    pids = {p.pid for p in reporting}
    measured = {s.pid for s in samples if outcome.start_ns <= s.at_ns <= outcome.end_ns}
    root = outcome.sampler.root if outcome.sampler is not None else 0
    others = (
        ProcessInfo(pid=pid, role=_role(pid, root, names.get(pid, "")), name=names.get(pid, ""))
        for pid in sorted(measured - pids)
    )
    return [*reporting, *others]


def _role(pid: int, root: int, name: str) -> str:
    """Return a process's role by its title, for runs without a probe: vLLM titles each of its processes."""
    if pid == root:
        return "front_end"
    if "EngineCore" in name:
        return "engine_core"
    return "worker" if "Worker" in name else "helper"
