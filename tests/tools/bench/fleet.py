"""Routers by replicas on recorded agent sessions: python -m tests.tools.bench.fleet PATH -> reports/tables/fleet.md.

PATH: a folder of sessions in the Weka format (docs/sessions.md). Replays the shape of a 70B model on 4 x 80 GiB at the
nominal step cost, with stock vLLM.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from kvtune.analysis.cache import seen_tokens
from kvtune.analysis.fleet import fleet
from kvtune.engine.setup import ROUTERS, Setup, Simulated
from kvtune.errors import KvtuneError
from kvtune.files import replacing
from kvtune.run.types import Run
from kvtune.sim.routing import routing
from kvtune.sim.simulators import Simulators
from kvtune.workload.spec import build
from kvtune.workload.types import Workload

REPLICAS = (2, 4, 8)
SESSIONS_EACH = 8
TABLE = Path("reports/tables/fleet.md")


def setup_of(model: str, blocks: int, end_s: float, count: int, router: str, load: Workload) -> Setup:
    flags = ["--num-gpu-blocks-override", str(blocks), "--block-size", "16", "--max-model-len", "131072"]
    flags += ["--max-num-batched-tokens", "8192", "--max-num-seqs", "256"]
    shared = routing(load, count, router)  # type: ignore[arg-type]
    device = Simulated(end_s=end_s, token_rows=0, async_scheduling=True)
    return shared.of(Setup(model=model, engine_args=flags, device=device))


def row(router: str, run: Run, load: Workload, measured_s: float) -> str:
    requests = run.table("requests")
    mine = (requests["sent_s"] >= measured_s) & (requests["hit_tokens"] >= 0)
    hits, prompts = requests["hit_tokens"][mine].sum(), requests["prompt_tokens"][mine].sum()
    seen = np.minimum(seen_tokens(run, load), requests["prompt_tokens"] - 1)[mine]
    infinite = (seen // 16 * 16).sum()
    by_replica = np.bincount(requests["engine"][mine], minlength=run.header.engine.engines)
    waits = (requests["first_token_s"] - requests["sent_s"])[mine]
    found = fleet(run)
    even = f"{found.balance:.2f}" if found is not None and found.balance else "–"
    return (
        f"| {router} | {100 * hits / infinite:.1f} | {100 * hits / prompts:.1f} | "
        f"{' '.join(map(str, by_replica.tolist()))} | {even} | {np.nanpercentile(waits, 99):.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--blocks", type=int, default=33_379, help="of 16 tokens, of each replica")
    parser.add_argument("--end", type=float, default=1500.0, help="virtual seconds")
    parser.add_argument(
        "--from", type=float, default=500.0, dest="measured_s", help="measured from this second on"
    )
    parser.add_argument("--replicas", type=int, nargs="*", default=list(REPLICAS))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    files = len(list(Path(asked.path).glob("*.json")))
    lines = [
        "# Routers by replicas: recorded agent sessions",
        "",
        f"`python -m tests.tools.bench.fleet PATH`: {files} sessions, {SESSIONS_EACH} at once for each replica, pauses",
        f"of at most 600 s, {asked.end:g} s of virtual time; requests sent from {asked.measured_s:g} s on count.",
        f"Pool of each replica: {asked.blocks:,} blocks of 16 tokens (of a 70B model on 4 x 80 GiB: 534k tokens).",
        f"Stock vLLM, nominal step cost, one seed ({asked.seed}): a few points of difference mean nothing.",
        "",
    ]
    for count in asked.replicas:
        slots = f"sessions={count * SESSIONS_EACH},max_think=600,hours={asked.end / 3600:.6g}"
        load = build(f"trace:format=weka,path={asked.path},{slots}", seed=asked.seed)
        lines += [
            f"## {count} replicas, {count * SESSIONS_EACH} sessions at once",
            "",
            "| router | % of an infinite cache's hits | hit rate, % | requests by replica | "
            "busiest / mean computed | p99 first token, s |",
            "|---|---|---|---|---|---|",
        ]
        wanted = [setup_of(asked.model, asked.blocks, asked.end, count, router, load) for router in ROUTERS]
        began = time.monotonic()
        with Simulators(2) as simulators:
            done = dict(simulators.map(load, wanted))
        for number, router in enumerate(ROUTERS):
            outcome = done[number]
            if isinstance(outcome, KvtuneError):
                lines.append(f"| {router} | {outcome.message} | | | | |")
            else:
                lines.append(row(router, outcome, load, asked.measured_s))
        lines.append("")
        print("\n".join(lines[-8:]), f"({time.monotonic() - began:.0f} s)", file=sys.stderr)
        with replacing(TABLE) as part:
            part.write("\n".join(lines).encode())


if __name__ == "__main__":
    main()
