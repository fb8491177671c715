"""What the core's policies hit against the best of stock's retention settings, by workload. `make policies`.

    python tests/bench/policies.py [--only rounds,zipf] [--parallel 2]

Replays of tiny-gemma3 through vLLM's own scheduler (8000 blocks of 32), default settings of each policy. A cell is hit
tokens over tokens that an engine which forgets nothing could hit. Writes reports/tables/policies.md and .json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvtune.analysis.cache import prefix_cache
from kvtune.core.compat.manifest import installed_version
from kvtune.core.settings import POLICIES
from kvtune.errors import KvtuneError
from kvtune.run.machine import this_host
from kvtune.sim.settings import SimSettings
from kvtune.sim.simulators import Simulators
from kvtune.workload.spec import build

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "reports" / "tables"
MODEL = "tiny-gemma3"
ENGINE = ["--num-gpu-blocks-override", "8000", "--block-size", "32", "--max-num-batched-tokens", "2048"]
RETENTION = ("0", "None", "512", "1024", "2048")
"""0 is stock's default."""
BEHIND = 4000
WORKLOADS = {
    **{
        f"rounds {p}": f"rounds:prefixes={p},prefix={BEHIND},suffix=64,output=16,rounds=3"
        for p in (15, 30, 40)
    },
    **{
        f"zipf {s}": f"zipf:prefixes=60,prefix={BEHIND},suffix=64,output=16,requests=240,s={s}"
        for s in ("1.0", "0.8", "1.2")
    },
    "mix": f"mix:prefixes=16,prefix={BEHIND},suffix=64,output=16,requests=240,cold=4064,share=0.5",
    **{
        f"chat {n}": f"chat:sessions={n},turns=6,system=512,first=2000,user=200,output=100,concurrency=4"
        for n in (10, 20, 30)
    },
}
VARIABLE = (20, 30)


def variable_suffixes(prefixes: int, rounds: int = 4) -> list[dict[str, Any]]:
    """The same prefixes again and again, behind each 16 to 1500 new tokens: lines of a Mooncake trace."""
    chance = random.Random(prefixes)
    fresh, lines = 1_000_000, []
    for visit in range(rounds * prefixes):
        suffix = chance.randrange(16, 1500)
        shared = [100 * (visit % prefixes) + i for i in range(8)]
        own = list(range(fresh, fresh + -(-suffix // 512)))
        fresh += len(own)
        lines.append(
            {
                "timestamp": 10_000 * visit,
                "input_length": 8 * 512 + suffix,
                "output_length": 16,
                "hash_ids": shared + own,
            }
        )
    return lines


def sides() -> dict[str, SimSettings]:
    """Every column: stock's settings, then the policies."""
    found = {
        f"stock {value}": SimSettings(
            model=MODEL, engine_args=[*ENGINE, "--prefix-cache-retention-interval", value], token_rows=0
        )
        for value in RETENTION
    }
    for policy in POLICIES:
        settings = {} if policy == "tiered" else {"policy": policy}
        if policy == "two_class":
            settings["reuse_bonus_s"] = 1e9  # LRU otherwise: it has no order of its own until it is tuned
        found[policy] = SimSettings(
            model=MODEL, engine_args=ENGINE, core="kvtune", core_settings=settings, token_rows=0
        )
    return found


def measure(spec: str, columns: dict[str, SimSettings], simulators: Simulators) -> dict[str, float]:
    """Share of the tokens that can hit, by column."""
    work = build(spec, seed=0)
    names = list(columns)
    found = {}
    for number, outcome in simulators.map(work, list(columns.values())):
        if isinstance(outcome, KvtuneError):
            raise outcome
        cache = prefix_cache(outcome, work)
        found[names[number]] = cache.hit_tokens / (cache.hit_tokens + cache.misses["not_cached"])
    return {name: found[name] for name in names}


def markdown(rows: dict[str, dict[str, float]], specs: dict[str, str], facts: dict[str, Any]) -> str:
    stock = [f"stock {value}" for value in RETENTION]
    lines = [
        "# Hit rates: the core's policies against the best of stock's retention settings",
        "",
        f"`{facts['command']}`, {facts['date']}, vLLM {facts['vllm']}, Python {facts['python']}, {facts['cpu']}, "
        f"{facts['seconds']:.0f} s",
        "",
        f"Replay of {MODEL} through vLLM's own scheduler, `{' '.join(ENGINE)}`. Percent of the prompt tokens that an "
        "engine which forgets nothing could hit. `tiered` is the default; `two_class` with reuse_bonus_s=1e9 (its "
        "default, 0, is the order of `lru`). The last column is `tiered` less the best of stock, in points.",
        "",
        "In the suffix workloads every prefix is 4096 tokens, a multiple of stock's intervals 1024 and 2048.",
        "",
        "| workload | " + " | ".join([*stock, *POLICIES, "tiered - stock"]) + " |",
        "|---|" + "---|" * (len(stock) + len(POLICIES) + 1),
    ]
    for name, row in rows.items():
        best = max(row[s] for s in stock)
        cells = [
            f"**{100 * row[s]:.1f}**" if s in stock and row[s] == best else f"{100 * row[s]:.1f}"
            for s in [*stock, *POLICIES]
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {100 * (row['tiered'] - best):+.1f} |")
    lines += ["", "| workload | spec |", "|---|---|"]
    lines += [f"| {name} | `{spec}` |" for name, spec in specs.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--only", default="", help="workloads whose names begin so, comma-separated; writes no table"
    )
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    chosen = tuple(options.only.split(",")) if options.only else ("",)
    started = time.monotonic()
    rows: dict[str, dict[str, float]] = {}
    specs = dict(WORKLOADS)
    columns = sides()
    with (
        tempfile.TemporaryDirectory(prefix="kvtune-policies-") as folder,
        Simulators(options.parallel) as simulators,
    ):
        for prefixes in VARIABLE:
            file = Path(folder) / f"suffixes-{prefixes}.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in variable_suffixes(prefixes)))
            specs[f"suffixes {prefixes}"] = f"trace:path={file}"
        for name, spec in specs.items():
            if not name.startswith(chosen):
                continue
            rows[name] = measure(spec, columns, simulators)
            print(f"{name:12s} " + "  ".join(f"{k} {100 * v:.1f}" for k, v in rows[name].items()), flush=True)
    lower = [n for n, r in rows.items() if r["tiered"] < max(r[f"stock {v}"] for v in RETENTION) - 0.01]
    if not options.only:
        for prefixes in VARIABLE:
            specs[f"suffixes {prefixes}"] = (
                f"{prefixes} prefixes of 4096 tokens in turn, 4 times, 16 to 1500 new tokens behind each"
            )
        facts = {
            "command": "python tests/bench/policies.py",
            "date": time.strftime("%Y-%m-%d"),
            "vllm": installed_version(),
            "python": sys.version.split()[0],
            "cpu": this_host().cpu,
            "seconds": time.monotonic() - started,
        }
        TABLES.mkdir(parents=True, exist_ok=True)
        (TABLES / "policies.md").write_text(markdown(rows, specs, facts))
        (TABLES / "policies.json").write_text(
            json.dumps({**facts, "workloads": specs, "share_of_hittable": rows}, indent=1) + "\n"
        )
    for name in lower:
        print(f"{name}: the default is more than a point below the best of stock")
    return 1 if lower else 0


if __name__ == "__main__":
    sys.exit(main())
