"""What the reuse-aware policy is worth on a recorded trace, with vLLM's scheduler in the loop. Writes a table.

    python tests/bench/trace_policies.py TRACE [--blocks 50000,100000] [--mode jump]

Blocks of 16 of a full-attention model. `reuse_bonus_s` is tuned on the first 40 % of the requests (by kvtune's model of
the policy, without the scheduler), then stock and the core replay the whole trace. The optimum is `kvtune bounds`'.
Sizes may be measured one call at a time: the table keeps those of the same mode that are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from math import inf
from pathlib import Path
from typing import Any

from kvtune.core.compat import installed_version
from kvtune.errors import KvtuneError
from kvtune.run.host import this_host
from kvtune.run.types import Run
from kvtune.sim.bounds import HEAD_STARTS_S
from kvtune.sim.bounds_paths import Paths, paths_of
from kvtune.sim.bounds_policies import hit_share, lru, optimum, two_class
from kvtune.sim.settings import MODES, SimSettings
from kvtune.sim.simulators import Simulators
from kvtune.workload.spec import build

TABLES = Path(__file__).parents[2] / "reports" / "tables"
KEPT = TABLES / "trace_policies.json"
MODEL = "tiny-llama"
BLOCK = 16
NODE = 512
TUNED_ON = 0.4


def tuned_bonus_s(paths: Paths, nodes: int) -> float:
    """What is best on the first part of the trace."""
    early = paths.first(int(len(paths) * TUNED_ON))
    tried = {s: hit_share(two_class(early, nodes, head_start_s=s), early) for s in HEAD_STARTS_S}
    tried[0.0] = hit_share(lru(early, nodes), early)
    best = max(tried, key=lambda s: tried[s])
    return 1e9 if best == inf else best


def share(run: Run, since: int) -> float:
    requests = run.table("requests")
    return float(requests["hit_tokens"][since:].sum() / requests["prompt_tokens"][since:].sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("trace", type=Path, help="Mooncake JSONL")
    parser.add_argument("--blocks", default="50000,100000")
    parser.add_argument("--mode", default="jump", choices=MODES)
    parser.add_argument("--limit", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    work = build(f"trace:path={options.trace},limit={options.limit}", seed=0)
    paths = paths_of(work, NODE)
    cut = int(len(paths) * TUNED_ON)
    sizes = [int(size) for size in options.blocks.split(",")]
    jobs: list[tuple[int, str, float, SimSettings]] = []
    for size in sizes:
        flags = ["--max-model-len", "131072", "--max-num-batched-tokens", "8192"]
        flags += ["--num-gpu-blocks-override", str(size)]
        bonus_s = tuned_bonus_s(paths, size * BLOCK // NODE)
        common: dict[str, Any] = {
            "model": MODEL,
            "mode": options.mode,
            "block_tokens": BLOCK,
            "token_rows": 0,
            "engine_args": flags,
        }
        jobs.append((size, "stock", 0.0, SimSettings(**common)))
        settings = {"policy": "two_class", "reuse_bonus_s": bonus_s}
        jobs.append(
            (size, "two_class", bonus_s, SimSettings(**common, core="kvtune", core_settings=settings))
        )
    found: dict[tuple[int, str], dict[str, float]] = {}
    with Simulators() as simulators:
        for number, outcome in simulators.map(work, [job[3] for job in jobs]):
            if isinstance(outcome, KvtuneError):
                raise outcome
            size, name, bonus_s, _ = jobs[number]
            found[size, name] = {
                "reuse_bonus_s": bonus_s,
                "whole": share(outcome, 0),
                "later": share(outcome, cut),
            }
            print(size, name, found[size, name], flush=True)
    rows = []
    for size in sizes:
        best = optimum(paths, size * BLOCK // NODE)
        for part, since in (("whole", 0), ("later", cut)):
            stock, ours = found[size, "stock"][part], found[size, "two_class"][part]
            most = hit_share(best, paths, since)
            rows.append(
                {
                    "blocks": size,
                    "part": part,
                    "stock": stock,
                    "two_class": ours,
                    "reuse_bonus_s": found[size, "two_class"]["reuse_bonus_s"],
                    "optimum": most,
                    "closed": (ours - stock) / (most - stock),
                    "mode": options.mode,
                    "requests": len(work.requests),
                    "date": time.strftime("%Y-%m-%d"),
                    "seconds": round(time.monotonic() - started),
                }
            )
    kept = json.loads(KEPT.read_text()) if KEPT.exists() and not options.limit else []
    rows += [row for row in kept if row["blocks"] not in sizes and row["mode"] == options.mode]
    rows.sort(key=lambda row: (row["blocks"], row["part"] == "later"))
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
        f"`python tests/bench/trace_policies.py {trace} --mode {first['mode']}`, {first['date']}, vLLM "
        f"{installed_version()}, Python {sys.version.split()[0]}, {this_host().cpu}",
        "",
        f"{first['requests']} requests through vLLM's own scheduler, {MODEL}, blocks of {BLOCK}. Percent of prompt "
        f"tokens hit; tuned on the first {100 * TUNED_ON:.0f} % of the requests. `later`: the others alone.",
        "",
        "| blocks | part | stock (LRU) | two_class | reuse_bonus_s | optimum (bounds) | of the gap closed |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['blocks']} | {row['part']} | {100 * row['stock']:.2f} | {100 * row['two_class']:.2f} | "
        f"{row['reuse_bonus_s']:g} | {100 * row['optimum']:.2f} | {100 * row['closed']:.1f} % |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
