"""What the reuse-aware policy is worth on a recorded trace, with vLLM's scheduler in the loop. Writes a table.

    python tests/tools/bench/trace_policies.py TRACE [--blocks 50000,100000] [--faster 4] [--again]

Blocks of 16 of a full-attention model. `reuse_bonus_s` of two_class is tuned on the first 40 % of the requests,
replayed with each of BONUSES_S. Then stock and the core replay the whole trace. The
optimum is `kvtune bounds`' (one request after another). Steps take the simulator's nominal times, divided by
`--faster`: the slower the engine, the more of the pool is held by requests that run. Sizes may be measured one call
at a time: the table keeps the others of its mode, and the columns that it has, unless they are wanted `--again`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtune.bounds.paths import paths_of
from kvtune.bounds.policies import hit_share, optimum
from kvtune.engine.setup import Setup, Simulated
from kvtune.errors import KvtuneError
from kvtune.fake_device.cost import NOMINAL, StepCost
from kvtune.run.machine import this_host
from kvtune.run.types import Run
from kvtune.sim.simulators import Simulators
from kvtune.vllm.manifest import installed_version
from kvtune.workload.spec import build
from kvtune.workload.types import Workload

TABLES = Path(__file__).parents[3] / "reports" / "tables"
KEPT = TABLES / "trace_policies.json"
MODEL = "tiny-llama"
BLOCK = 16
NODE = 512
TUNED_ON = 0.4
POLICIES = ("stock", "two_class")
BONUSES_S = (100.0, 300.0, 1000.0, 1e9)
"""Of the engine's time, which is longer than the trace's where requests queue."""


def nominal(faster: float) -> StepCost:
    """The nominal engine, so many times as fast."""
    times = {
        name: value / faster
        for name, value in msgspec.structs.asdict(NOMINAL).items()
        if type(value) is float
    }
    return msgspec.structs.replace(NOMINAL, **times)


def settings(blocks: int, bonus_s: float, name: str = "two_class", faster: float = 1.0) -> Setup:
    core: dict[str, Any] = {}
    if name != "stock":
        core = {"core": "kvtune", "core_settings": {"policy": name, "reuse_bonus_s": bonus_s}}
    flags = ["--max-model-len", "131072", "--max-num-batched-tokens", "8192"]
    return Setup(
        model=MODEL,
        engine_args=[*flags, "--num-gpu-blocks-override", str(blocks)],
        device=Simulated(block_tokens=BLOCK, token_rows=0, cost=nominal(faster)),
        **core,
    )


def replayed(simulators: Simulators, work: Workload, wanted: list[Setup]) -> list[Run]:
    runs: dict[int, Run] = {}
    for number, outcome in simulators.map(work, wanted):
        if isinstance(outcome, KvtuneError):
            raise outcome
        runs[number] = outcome
    return [runs[number] for number in range(len(wanted))]


def share(run: Run, since: int) -> float:
    requests = run.table("requests")
    return float(requests["hit_tokens"][since:].sum() / requests["prompt_tokens"][since:].sum())


def held(run: Run, blocks: int) -> float:
    """Mean share of the pool that running requests hold."""
    requests = run.table("requests")
    tokens = (requests["prompt_tokens"] + requests["output_tokens"]) / BLOCK
    stays_s = requests["finished_s"] - requests["sent_s"]
    return float(np.sum(tokens * stays_s) / requests["finished_s"].max() / blocks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("trace", type=Path, help="Mooncake JSONL")
    parser.add_argument("--blocks", default="50000,100000")
    parser.add_argument("--faster", type=float, default=1.0)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="replay columns that the table has, too")
    options = parser.parse_args()
    started = time.monotonic()
    work = build(f"trace:path={options.trace},limit={options.limit}", seed=0)
    paths = paths_of(work, NODE)
    cut = int(len(paths) * TUNED_ON)
    sizes = [int(size) for size in options.blocks.split(",")]
    early = build(f"trace:path={options.trace},limit={cut}", seed=0)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() and not options.limit else []
    by_name: dict[tuple[int, str], dict[str, float]] = {}
    if not options.again:
        mine = [row for row in kept if row["faster"] == options.faster and row["blocks"] in sizes]
        for row, name in itertools.product(mine, POLICIES):
            if name in row:
                cells = by_name.setdefault((row["blocks"], name), {"reuse_bonus_s": row["reuse_bonus_s"]})
                cells |= {row["part"]: row[name], "held": row["held"]}
    with Simulators() as simulators:
        untuned = [size for size in sizes if (size, "two_class") not in by_name]
        tried = [(size, bonus_s) for size in untuned for bonus_s in BONUSES_S]
        tuned = replayed(simulators, early, [settings(*one, faster=options.faster) for one in tried])
        jobs: list[tuple[int, str, float]] = []
        for size in sizes:
            shares = {s: share(run, 0) for (of, s), run in zip(tried, tuned, strict=True) if of == size}
            print(size, "tried on the first part:", shares, flush=True)
            bonus_s = max(shares, key=lambda s: shares[s]) if shares else 0.0
            jobs += [
                (size, name, bonus_s if name == "two_class" else 0.0)
                for name in POLICIES
                if (size, name) not in by_name
            ]
        wanted = [settings(size, bonus_s, name, options.faster) for size, name, bonus_s in jobs]
        for (size, name, bonus_s), run in zip(jobs, replayed(simulators, work, wanted), strict=True):
            by_name[size, name] = {
                "reuse_bonus_s": bonus_s,
                "whole": share(run, 0),
                "later": share(run, cut),
                "held": held(run, size),
            }
            print(size, name, by_name[size, name], flush=True)
    rows = []
    for size in sizes:
        best = optimum(paths, size * BLOCK // NODE)
        for part, since in (("whole", 0), ("later", cut)):
            stock, ours = (by_name[size, name][part] for name in POLICIES)
            most = hit_share(best, paths, since)
            rows.append(
                {
                    "blocks": size,
                    "part": part,
                    "stock": stock,
                    "two_class": ours,
                    "reuse_bonus_s": by_name[size, "two_class"]["reuse_bonus_s"],
                    "optimum": most,
                    "held": by_name[size, "two_class"]["held"],
                    "faster": options.faster,
                    "closed": (ours - stock) / (most - stock),
                    "requests": len(work.requests),
                    "date": time.strftime("%Y-%m-%d"),
                    "seconds": round(time.monotonic() - started),
                }
            )
    here = {(size, options.faster) for size in sizes}
    rows += [row for row in kept if (row["blocks"], row["faster"]) not in here]
    rows.sort(key=lambda row: (row["faster"], row["blocks"], row["part"] == "later"))
    text = markdown(rows, options.trace.name)
    print(text)
    if not options.limit:
        TABLES.mkdir(parents=True, exist_ok=True)
        (TABLES / "trace_policies.md").write_text(text)
        KEPT.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def markdown(rows: list[dict[str, Any]], trace: str) -> str:
    first = rows[0]
    lines = [
        "# Reuse-aware eviction on a recorded trace",
        "",
        f"`python tests/tools/bench/trace_policies.py {trace} --mode {first['mode']}`, {first['date']}, vLLM "
        f"{installed_version()}, Python {sys.version.split()[0]}, {this_host().cpu}",
        "",
        f"{first['requests']} requests through vLLM's own scheduler, {MODEL}, blocks of {BLOCK}. Percent of prompt "
        f"tokens hit; tuned on the first {100 * TUNED_ON:.0f} % of the requests. `later`: the others alone. `engine`: "
        "how many times as fast as nominal; `held`: mean share of the pool that requests hold which run or wait. The "
        "optimum knows what comes, and serves one request after another.",
        "",
        "| engine | blocks | held | part | stock (LRU) | two_class | reuse_bonus_s | optimum (bounds) | "
        "of the gap closed by two_class |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['faster']:g} | {row['blocks']} | {100 * row['held']:.0f} % | {row['part']} | "
        f"{100 * row['stock']:.2f} | {100 * row['two_class']:.2f} | "
        f"{row['reuse_bonus_s']:g} | {100 * row['optimum']:.2f} | {100 * row['closed']:.1f} % |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
