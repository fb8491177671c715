"""How much host memory is worth it, on a recorded trace, by eviction policy of the tier. Writes a table.

    python tests/tools/bench/offload.py TRACE [--blocks 50000] [--times 1,2,4,8] [--policies lru,arc,lru:2] ..
    python tests/tools/bench/offload.py TRACE --cpu    CPU seconds of replays with a tier and without; no table

vLLM's own scheduler, connector and manager, replayed. A token has 128 KiB of KV in the table; the replayed
model has less, and its copies are as much slower, so that they take the time of 25 GiB/s each way. Steps take the
simulator's nominal times. A replay that the table has of the same day is not made again, unless `--again`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvtune.analysis.offload import offload
from kvtune.engine.setup import Setup, Simulated
from kvtune.errors import KvtuneError
from kvtune.fake_device.cost import GIB, CopyTime
from kvtune.run.machine import this_host
from kvtune.run.types import Run
from kvtune.sim.replay import replay
from kvtune.sim.simulators import Simulators
from kvtune.vllm.manifest import installed_version
from kvtune.workload.spec import build

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.tools.bench.trace_policies import BLOCK, TABLES, nominal

KEPT, TABLE = TABLES / "offload.json", TABLES / "offload.md"
MODEL = "tiny-llama"
BLOCK_BYTES = 16_384
"""Of the model that is replayed; a run whose tier holds another number of chunks is refused."""
TOKEN_BYTES = 128 * 1024
"""Of the engine that the table speaks of."""
GIB_S = 25.0
TRACKED = 8_000_000
"""Chunks that vLLM remembers to count how often each was offered."""


def settings(blocks: int, times: float, policy: str, core: Any) -> Setup:
    flags = ["--max-model-len", "131072", "--max-num-batched-tokens", "8192"]
    flags += ["--num-gpu-blocks-override", str(blocks)]
    if times:
        name, _, threshold = policy.partition(":")
        chosen: dict[str, Any] = {"eviction_policy": name}
        if threshold:
            chosen |= {"store_threshold": int(threshold), "max_tracker_size": TRACKED}
        extra = {"kv_connector_extra_config": chosen}
        flags += ["--kv-offloading-size", str(times * blocks * BLOCK_BYTES / GIB)]
        flags += ["--kv-transfer-config", json.dumps(extra)]
    copied_s = GIB_S * BLOCK_BYTES / (BLOCK * TOKEN_BYTES)
    return Setup(
        model=MODEL,
        core=core,
        engine_args=flags,
        device=Simulated(
            block_tokens=BLOCK,
            token_rows=0,
            cost=nominal(1.0),
            copy=CopyTime(store_gib_s=copied_s, load_gib_s=copied_s),
        ),
    )


def row_of(run: Run, blocks: int, times: float, policy: str, core: str) -> dict[str, Any]:
    requests = run.table("requests")
    prompt = int(requests["prompt_tokens"].sum())
    tier = offload(run)
    row: dict[str, Any] = {
        "core": core,
        "blocks": blocks,
        "times": times,
        "policy": policy,
        "requests": len(requests["prompt_tokens"]),
        "ttft_s": float((requests["first_token_s"] - requests["sent_s"]).mean()),
        "date": time.strftime("%Y-%m-%d"),
    }
    if tier is None:
        hits = float(requests["hit_tokens"].sum() / prompt)
        return row | {"pool": hits, "tier": 0.0, "computed": 1 - hits, "stored": 0.0, "loaded": 0.0}
    if tier.copies is None or tier.tier_chunks != round(times * blocks):
        raise SystemExit(f"the tier has {tier.tier_chunks} chunks, {times * blocks:.0f} were meant")
    in_tokens = BLOCK / BLOCK_BYTES / prompt
    return row | {
        "pool": tier.pool_hit_tokens / prompt,
        "tier": tier.tier_hit_tokens / prompt,
        "computed": tier.computed_tokens / prompt,
        "stored": tier.copies.stored_bytes * in_tokens,
        "loaded": tier.copies.loaded_bytes * in_tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("trace", type=Path, help="Mooncake JSONL")
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--times", default="1,2,4,8", help="sizes of the tier, in pools")
    parser.add_argument("--policies", default="lru,arc,lru:2", help="a store threshold follows a colon")
    parser.add_argument("--core", default="stock", choices=("stock", "kvtune"))
    parser.add_argument("--limit", type=int, default=0, help="requests; nothing is written then")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="print CPU seconds, one replay after another")
    options = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() and not options.limit else []
    if options.again or options.cpu:
        kept = []
    jobs = [(0.0, "none")]
    jobs += [(float(t), p) for t in options.times.split(",") for p in options.policies.split(",")]
    have = {(row["core"], row["blocks"], row["times"], row["policy"]) for row in kept}
    jobs = [job for job in jobs if (options.core, options.blocks, *job) not in have]
    work = build(f"trace:path={options.trace},limit={options.limit}", seed=0)
    if options.cpu:
        for times, policy in jobs:
            began = time.process_time()
            replay(work, settings(options.blocks, times, policy, options.core))
            print(f"{policy} {times:g}x: {time.process_time() - began:.1f} CPU s", flush=True)
        return 0
    with Simulators() as simulators:
        wanted = [settings(options.blocks, times, policy, options.core) for times, policy in jobs]
        for number, run in simulators.map(work, wanted):
            if isinstance(run, KvtuneError):
                raise run
            row = row_of(run, options.blocks, *jobs[number], options.core)
            print(row, flush=True)
            kept.append(row)
            if not options.limit:
                write(kept, options.trace.name)
    return 0


def write(rows: list[dict[str, Any]], trace: str) -> None:
    rows.sort(key=lambda row: (row["core"] != "stock", row["blocks"], row["times"], row["policy"]))
    TABLES.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(rows, indent=1) + "\n")
    TABLE.write_text(markdown(rows, trace))


def markdown(rows: list[dict[str, Any]], trace: str) -> str:
    lines = [
        "# How much host memory is worth it, on a recorded trace",
        "",
        f"`make offload TRACE={trace}`, {max(row['date'] for row in rows)}, vLLM {installed_version()}, Python "
        f"{sys.version.split()[0]}, {this_host().cpu}",
        "",
        f"{rows[0]['requests']} requests through vLLM's own scheduler and offloading connector, in replay; {MODEL}, "
        f"blocks of {BLOCK}. Sizes and bytes are those of a model with {TOKEN_BYTES // 1024} KiB of KV a token, copied "
        f"at {GIB_S:g} GiB/s each way; steps take the simulator's nominal times, so first-token times compare rows "
        "and say nothing about a machine. Percent of prompt tokens; `stored` and `loaded`: of the KV of all prompt "
        f"tokens. `lru:2`: store_threshold 2, with max_tracker_size {TRACKED}.",
        "",
        "| core | pool, blocks | tier, pools | tier, GiB | policy | hit in the pool | hit in the tier | computed | "
        "stored | loaded | first token, nominal s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gib = row["times"] * row["blocks"] * BLOCK * TOKEN_BYTES / GIB
        figures = (row[name] for name in ("pool", "tier", "computed", "stored", "loaded"))
        lines.append(
            f"| {row['core']} | {row['blocks']} | {row['times']:g} | {gib:.0f} | {row['policy']} | "
            + " | ".join(f"{100 * figure:.2f}" for figure in figures)
            + f" | {row['ttft_s']:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
