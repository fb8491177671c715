"""Made-up runs for tests and golden files: shapes from a toy step loop, the same for equal arguments.

Nothing here is a measurement. `rounds_run` re-sends prefixes, `open_run` has arrivals (10k steps), and the
rest bend one of them: partial, empty, hostile strings, predicted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from kvtune.data.run.types import (
    TABLES,
    CoreInfo,
    EngineInfo,
    Header,
    HostInfo,
    ProbeInfo,
    ProcessInfo,
    Run,
    Table,
    Validity,
    WorkloadInfo,
)
from kvtune.requests.loads.spec import build
from tests.golden.loop import CHUNK, engine_loop, whole

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>{{7*7}}\"'&"


def header(**changes: Any) -> Header:
    base = Header(
        kvtune="0.1.0",
        source="engine",
        started_at="2026-11-21T10:00:00+00:00",
        command=[
            "kvtune",
            "profile",
            "tiny-gemma3",
            "-w",
            "rounds:prefixes=15,prefix=4000,suffix=64,rounds=3",
        ],
        model="tiny-gemma3",
        model_config={"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6},
        workload=WorkloadInfo(
            name="rounds",
            spec="rounds:prefixes=15,prefix=4000,suffix=64,output=16,rounds=3",
            params={"prefixes": 15, "prefix": 4000, "suffix": 64, "output": 16, "rounds": 3},
            seed=0,
            hash="1f0c9d5e2b7a4466",
            requests=45,
        ),
        core=CoreInfo(name="stock"),
        engine=EngineInfo(
            vllm="0.32.0",
            torch="2.13.0+cpu",
            device="cpu",
            device_name="AMD EPYC 9B14",
            executor="mp",
            block_size=32,
            num_blocks=8000,
            max_model_len=8192,
            settings={"max_num_batched_tokens": CHUNK, "enable_prefix_caching": True, "max_num_seqs": 128},
            args=["--num-gpu-blocks-override", "8000", "--block-size", "32"],
            groups=[
                {"kind": "full", "block_size": 32, "layers": 1, "page_bytes": 16384},
                {"kind": "sliding_window", "block_size": 32, "sliding_window": 512, "layers": 5},
            ],
        ),
        python="3.11.7",
        host=HostInfo(cpu="AMD EPYC 9B14", cores=2, memory_bytes=24 << 30, os="Linux 6.1"),
        processes=[
            ProcessInfo(
                pid=100, role="front_end", name="host", gc={"thresholds": [700, 10, 10], "frozen": 0}
            ),
            ProcessInfo(pid=101, role="engine_core", name="EngineCore", gc={"frozen": 412_000}),
            ProcessInfo(pid=102, role="worker", name="Worker_0", gc={"frozen": 0}),
        ],
        probe=ProbeInfo(level="light"),
        startup_s=24.6,
        log_tail=["INFO engine started", "INFO KV cache size: 256,000 tokens"],
    )
    return msgspec.structs.replace(base, **changes)


def rounds_run(
    *,
    prefixes: int = 15,
    prefix: int = 4000,
    suffix: int = 64,
    output: int = 16,
    rounds: int = 3,
    hit_share: tuple[float, ...] = (0.0, 0.0, 0.9843),
    speed: float = 1.0,
    seed: int = 0,
    **changes: Any,
) -> Run:
    """Prefixes re-sent in turn, one request after another; `hit_share[r]` of round r's prompt tokens hit."""
    prompts, rounds_of, hits = [], [], []
    for number in range(rounds):
        for _ in range(prefixes):
            prompts.append(prefix + suffix)
            rounds_of.append(number)
            hits.append(int((prefix + suffix) * hit_share[min(number, len(hit_share) - 1)]) // 32 * 32)
    info = msgspec.structs.replace(
        header().workload,
        spec=f"rounds:prefixes={prefixes},prefix={prefix},suffix={suffix},output={output},rounds={rounds}",
        params={"prefixes": prefixes, "prefix": prefix, "suffix": suffix, "output": output, "rounds": rounds},
        requests=len(prompts),
        seed=seed,
    )
    info = msgspec.structs.replace(info, hash=build(info.spec, seed=seed).hash)
    n = len(prompts)
    tables = engine_loop(
        np.array(prompts),
        np.full(n, output),
        np.array(hits),
        None,
        np.array(rounds_of),
        ["round"] * n,
        speed,
        seed,
    )
    return _run(tables, workload=info, **changes)


def open_run(
    *, requests: int = 100, rate: float = 3.0, output: int = 120, seed: int = 1, **changes: Any
) -> Run:
    """Poisson arrivals of chat-like requests: about 10k steps with the defaults."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    prompts = rng.integers(200, 3000, requests)
    hits = (prompts * np.clip(rng.beta(0.6, 1.2, requests), 0, 0.97)).astype(int) // 32 * 32
    outputs = rng.integers(output // 3, output * 2, requests)
    info = msgspec.structs.replace(
        header().workload,
        name="chat",
        spec=f"chat:sessions=60,turns=10,rate={rate}",
        params={"sessions": 60, "turns": 10, "rate": rate},
        requests=requests,
        hash="77aa12bd09ee4c01",
    )
    tables = engine_loop(
        prompts, outputs, hits, arrivals, np.full(requests, -1), ["turn"] * requests, 3.0, seed
    )
    return _run(tables, workload=info, **changes)


def partial_run() -> Run:
    """An engine that died in the middle: the second half of the requests never finished."""
    run = rounds_run(prefixes=5, state="partial", why="EngineCore (pid 101) was killed by signal 9 at 1.8 s")
    requests = {k: v.copy() for k, v in run.tables["requests"].items()}
    half = len(requests["id"]) // 2
    for column in ("first_token_s", "finished_s"):
        requests[column][half:] = np.nan
    requests["sent_s"][half + 1 :] = np.nan
    requests["hit_tokens"][half:] = -1
    requests["output_tokens"][half:] = 0
    requests["finish"] = requests["finish"].copy()
    requests["finish"][half:] = ""
    end = requests["sent_s"][half]
    tables = dict(run.tables, requests=requests)
    for name in ("tokens", "steps", "gc", "memory"):
        keep = tables[name]["t_s"] <= end
        tables[name] = {k: v[keep] for k, v in tables[name].items()}
    return Run(msgspec.structs.replace(run.header, wall_s=float(end)), tables)


def empty_run() -> Run:
    """An engine that failed to start: a header and no table at all."""
    return Run(
        header(
            state="failed",
            why="the engine did not start: CUDA out of memory",
            wall_s=0.0,
            processes=[],
            probe=ProbeInfo(level="off"),
        )
    )


def hostile_run() -> Run:
    """Every string that a run carries from outside is markup."""
    run = rounds_run(rounds=2, prefixes=4)
    h = run.header
    requests = dict(run.tables["requests"])
    requests["id"] = np.array([f"{HOSTILE}{i}" for i in range(len(requests["id"]))])
    requests["kind"] = np.array([HOSTILE] * len(requests["id"]))
    requests["finish"] = np.array([HOSTILE] * len(requests["id"]))
    return Run(
        msgspec.structs.replace(
            h,
            model=f"/models/{HOSTILE}",
            command=["kvtune", "profile", HOSTILE],
            why=HOSTILE,
            state="partial",
            notes=[HOSTILE],
            log_tail=[HOSTILE] * 3,
            valid=Validity(timings=False, why=HOSTILE),
            core=CoreInfo(name="kvtune", active=False, why=HOSTILE, settings={HOSTILE: HOSTILE}),
            engine=msgspec.structs.replace(
                h.engine, device_name=HOSTILE, args=[HOSTILE], settings={HOSTILE: HOSTILE}
            ),
            host=msgspec.structs.replace(h.host, cpu=HOSTILE),
            workload=msgspec.structs.replace(
                h.workload, spec=HOSTILE, name=HOSTILE, params={HOSTILE: HOSTILE}
            ),
            processes=[msgspec.structs.replace(p, name=HOSTILE) for p in h.processes],
            probe=ProbeInfo(level="light", lost_records={HOSTILE: 3}, disabled={HOSTILE: HOSTILE}),
        ),
        dict(run.tables, requests=requests),
    )


def kvtune_run() -> Run:
    """The optimized core on the load of the golden `rounds` run: hits from the second round on."""
    core = CoreInfo(name="kvtune", active=True, settings={"pin_window": 1024}, counters={"windows_kept": 12})
    return rounds_run(prefixes=4, prefix=600, suffix=64, output=8, hit_share=(0.0, 0.9, 0.9), core=core)


def evicting_run() -> Run:
    """A pool that is too small: prefills push blocks out of two of its queues."""
    run = kvtune_run()
    steps = run.tables["steps"]
    rows = []
    for number in np.flatnonzero(steps["prefill_tokens"]):
        blocks, t_s, free = (
            int(steps["prefill_tokens"][number]) // 32,
            steps["t_s"][number],
            8000 - int(number),
        )
        rows.append((1, t_s, 0, blocks // 4, free))
        rows.append((1, t_s, 3, blocks - blocks // 4, free))
        if number % 3 == 0:
            rows.append((1, t_s, 4, 0, free))  # older files have rows without evictions
    names = list(TABLES["pool"])
    pool = {name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    tiers = ["speculative", "far", "near", "probation", "protected"]
    engine = msgspec.structs.replace(
        run.header.engine, settings={**run.header.engine.settings, "tiers": tiers}
    )
    return Run(
        msgspec.structs.replace(run.header, engine=engine), {**run.tables, "pool": whole("pool", pool)}
    )


def sim_run() -> Run:
    """A prediction: the same record with source = sim, no collections and no memory samples."""
    run = rounds_run(
        prefixes=5, source="sim", valid=Validity(timings=False, why="predicted by the simulator")
    )
    return Run(run.header, {k: v for k, v in run.tables.items() if k not in ("gc", "memory")})


def bare_run() -> Run:
    """Probes off: requests and tokens only."""
    run = rounds_run(prefixes=5, probe=ProbeInfo(level="off"))
    return Run(run.header, {k: v for k, v in run.tables.items() if k in ("requests", "tokens")})


def _run(tables: dict[str, Table], **changes: Any) -> Run:
    tables = {name: whole(name, table) for name, table in tables.items()}
    requests = tables["requests"]
    wall_s = float(np.nanmax(requests["finished_s"]))
    counters = {
        "requests": float(len(requests["id"])),
        "queries": float(requests["prompt_tokens"].sum()),
        "hits": float(requests["hit_tokens"].sum()),
    }
    return Run(header(**{"wall_s": wall_s, "engine_counters": counters, **changes}), tables)


def replace_header(run: Run, **changes: Any) -> Run:
    return dataclasses.replace(run, header=msgspec.structs.replace(run.header, **changes))
