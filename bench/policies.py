"""What the core's policies hit against the best of stock's settings, by load. `make policies`.

    python bench/policies.py [--only rounds,zipf] [--parallel 2] [--again] [--columns first]

Replays through vLLM's own scheduler, of a model with sliding windows, in three sizes of pool; each size with another
seed, so that three seeds are seen. A cell is hit tokens over tokens that an engine which forgets nothing could hit. The
rule: the default hits no less than stock's default; rows that miss are listed, and it exits 1. A row behind hindsight
is what `kvtune tune` is for. Writes reports/tables/policies.md, .json. Stopped, the same command goes on behind its
last row (reports/policies-rows.jsonl); after a change of the core, `--again` measures all rows anew, `--columns first`
that column of all rows: the others are the table's.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.loads import (
    LONGEST,
    OURS,
    WINDOWS,
    Load,
    best_of_stock,
    columns,
    measure,
    write,
)
from kvtune.data.installed import installed_version
from kvtune.data.run.machine import this_host
from kvtune.lab.sim.simulators import Simulators

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "reports" / "tables"
JOURNAL = ROOT / "reports" / "policies-rows.jsonl"
POOLS = (4000, 6000, 8000)
"""Blocks of 32."""
BEHIND = 4000
COLUMNS = (OURS, "two_class", "chat", "pin")
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
PARTS: dict[str, Load] = {
    "sessions": {"kind": "sessions", "sessions": 200, "turns": 6, "new": 2, "think_s": 30.0, "every_s": 12.0},
    "phases": {
        "kind": "phases", "hot": 20, "nodes": 8, "requests": 800, "stays": 100, "skew": 0.0, "suffix": 64,
        "every_s": 2.0,
    },
    "pairs": {"kind": "visits", "prompts": 200, "nodes": 9, "times": 2, "apart": 10, "suffix": 64, "every_s": 4.0},
    "scan": {"kind": "scan", "prefixes": 20, "nodes": 8, "rounds": 6, "suffix": 64, "every_s": 2.0},
}  # fmt: skip
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


def rows_of(folder: Path) -> list[tuple[str, str, int, int]]:
    """(load, workload spec, blocks, seed) of each row; what comes at random has another seed in each size of pool."""
    specs: list[tuple[str, str, int, int]] = []
    for seed, blocks in enumerate(POOLS):
        specs += [(name, spec, blocks, seed) for name, spec in WORKLOADS.items()]
        for prefixes in VARIABLE:
            file = folder / f"suffixes-{prefixes}.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in variable_suffixes(prefixes)))
            specs.append((f"suffixes {prefixes}", f"trace:path={file}", blocks, seed))
        for name, part in PARTS.items():
            load = {"seed": seed, "parts": [{"start_s": 0.0, "output": 16, **part}]}
            specs.append((name, write(load, folder), blocks, seed))
    return specs


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("load", "blocks", "seed"))


def misses(rows: list[dict[str, Any]]) -> list[str]:
    """Rows in which the default hits less than stock's default, with by how much."""
    return [
        f"{row['load']}, {row['blocks']} blocks: {behind:.1f} points below stock's default"
        for row in rows
        if (behind := row["share"]["stock 0"] - row["share"][OURS]) > 0
    ]


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    lines = [
        "# Hit rates: the core's orders of eviction beside stock",
        "",
        f"`{facts['command']}`, {facts['date']}, vLLM {facts['vllm']}, Python {facts['python']}, {facts['cpu']}, "
        f"{facts['seconds']:.0f} s",
        "",
        f"Replays of {WINDOWS} through vLLM's own scheduler, blocks of 32, chunks of 2,048 tokens. Percent of the "
        "prompt tokens that an engine which forgets nothing could hit. Stock's best is the best of its retention "
        f"settings (in brackets), chosen in hindsight. `{OURS}` is kvtune's default; `two_class` runs with "
        "reuse_bonus_s=1e9.",
        "",
        f"| load | blocks | stock's default | stock's best | {' | '.join(COLUMNS)} | {OURS} - stock's default |",
        "|---|---" + "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for row in rows:
        share, best = row["share"], best_of_stock(row["share"])
        setting = next(name for name, value in share.items() if value == best).removeprefix("stock ")
        cells = [
            f"{share['stock 0']:.1f}",
            f"{best:.1f} ({setting})",
            *(f"{share[name]:.1f}" for name in COLUMNS),
        ]
        lines.append(
            f"| {row['load']} | {row['blocks']} | {' | '.join(cells)} | {share[OURS] - share['stock 0']:+.1f} |"
        )
    missed = misses(rows)
    lines += ["", "Rows in which the default is below stock's default: " + ("none." if not missed else "")]
    lines += ["", *(f"- {line}" for line in missed)] if missed else []
    lines += ["", "| load | spec |", "|---|---|"]
    lines += [f"| {name} | `{spec}` |" for name, spec in WORKLOADS.items()]
    lines += [
        f"| suffixes {p} | {p} prefixes of 4096 tokens in turn, 4 times, 16 to 1500 new tokens behind each |"
        for p in VARIABLE
    ]
    lines += [f"| {name} | `{json.dumps(part)}` |" for name, part in PARTS.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--only", default="", help="loads whose names begin so, comma-separated; writes no table"
    )
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure rows again that were measured")
    parser.add_argument("--columns", default="", help="comma-separated; the others are the table's")
    options = parser.parse_args()
    chosen = tuple(options.only.split(",")) if options.only else ("",)
    wanted = options.columns.split(",") if options.columns else []
    if unknown := set(wanted) - columns(WINDOWS, 1, COLUMNS).keys():
        parser.error(f"no such column: {', '.join(sorted(unknown))}")
    if options.again or wanted:
        JOURNAL.unlink(missing_ok=True)
    done = [json.loads(line) for line in JOURNAL.read_text().splitlines()] if JOURNAL.exists() else []
    known = {_key(row): row for row in done}
    kept = json.loads((TABLES / "policies.json").read_text())["rows"] if wanted else []
    table = {_key(row): row["share"] for row in kept}
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="policies-") as folder,
        Simulators(options.parallel) as simulators,
    ):
        for name, spec, blocks, seed in rows_of(Path(folder)):
            if not name.startswith(chosen):
                continue
            row = {"load": name, "blocks": blocks, "seed": seed}
            if _key(row) not in known:
                sides = columns(WINDOWS, blocks, COLUMNS, length=LONGEST)
                row_started = time.monotonic()
                known_share = table.get(_key(row), {})
                again = {n: side for n, side in sides.items() if n in wanted or n not in known_share}
                measured = known_share | measure(spec, again, simulators, seed)
                row["share"] = {n: measured[n] for n in (*sides, "hittable")}
                row["seconds"] = round(time.monotonic() - row_started, 1)
                with JOURNAL.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                known[_key(row)] = row
            rows.append(known[_key(row)])
            share = rows[-1]["share"]
            print(
                f"{name:12s} {blocks:5d} "
                + "  ".join(f"{k} {v:.1f}" for k, v in share.items() if k != "hittable"),
                flush=True,
            )
    if not options.only:
        facts = {
            "command": "python bench/policies.py" + (f" --columns {options.columns}" if wanted else ""),
            "date": time.strftime("%Y-%m-%d"),
            "vllm": installed_version(),
            "python": sys.version.split()[0],
            "cpu": this_host().cpu,
            "seconds": sum(row["seconds"] for row in rows),
        }
        TABLES.mkdir(parents=True, exist_ok=True)
        (TABLES / "policies.md").write_text(markdown(rows, facts))
        (TABLES / "policies.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    missed = misses(rows)
    for line in missed:
        print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
