"""What admission by cached prefix does on a recorded trace, and on loads made to suffer by it. Writes a table.

    python tests/bench/admission.py TRACE [--limit 4000] [--blocks 50000] [--mode jump]

Replays with vLLM's scheduler: the trace on an engine of 0.6 of the nominal speed (too slow for it), of the nominal one
and of twice that, first come first served and longest prefix first with several bounds; then three loads in which
somebody pays for it. Steps take the simulator's nominal times: compare rows, not seconds with a real engine's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))

from trace_policies import nominal

from kvtune.analysis.admission import admission
from kvtune.core.compat.manifest import installed_version
from kvtune.errors import KvtuneError
from kvtune.run.machine import this_host
from kvtune.run.types import Run
from kvtune.sim.settings import MODES, Mode, SimSettings
from kvtune.sim.simulators import Simulators
from kvtune.workload.spec import build

TABLE = Path(__file__).parents[2] / "reports" / "tables" / "admission.md"
MODEL = "tiny-llama"
BLOCK = 16
SLOW = 0.6
FCFS: dict[str, Any] = {}
BOUNDS_S = (30.0, 100.0, 300.0)
# Who pays. Requests of a kind "hot" share prefixes, those of a kind "cold" share nothing.
HARM = {
    "one hot prefix, always cached, starves cold prompts": (
        "mix:prefixes=1,prefix=4000,suffix=600,output=60,cold=4600,share=0.3,requests=3000,rate=60,concurrency=0",
        50_000,
    ),
    "much cached and much to compute goes before short cold prompts": (
        "mix:prefixes=1,prefix=4000,suffix=6000,output=60,cold=300,share=0.5,requests=2000,rate=30,concurrency=0",
        50_000,
    ),
    "many equally hot prefixes in a small pool": (
        "mix:prefixes=60,prefix=4000,suffix=600,output=60,cold=4600,share=0.2,requests=3000,rate=60,concurrency=0",
        10_000,
    ),
}


def settings(mode: Mode, blocks: int, speed: float, core: dict[str, Any]) -> SimSettings:
    flags = ["--max-model-len", "131072", "--max-num-batched-tokens", "8192"]
    return SimSettings(
        model=MODEL,
        mode=mode,
        block_tokens=BLOCK,
        token_rows=0,
        cost=nominal(speed),
        engine_args=[*flags, "--num-gpu-blocks-override", str(blocks)],
        core="kvtune",
        core_settings=core,
    )


def bounded(age_s: float) -> dict[str, Any]:
    return {"admission": "longest_prefix", "admission_age_s": age_s}


def replayed(simulators: Simulators, spec: str, wanted: list[SimSettings]) -> list[Run]:
    runs: dict[int, Run] = {}
    for number, outcome in simulators.map(build(spec, seed=0), wanted):
        if isinstance(outcome, KvtuneError):
            raise outcome
        runs[number] = outcome
    return [runs[number] for number in range(len(wanted))]


def order(core: dict[str, Any]) -> str:
    return f"longest prefix, {core['admission_age_s']:g} s" if core else "first come first served"


def times(run: Run, kind: str = "") -> NDArray[np.float64]:
    requests = run.table("requests")
    ttft_s: NDArray[np.float64] = requests["first_token_s"] - requests["sent_s"]
    return ttft_s[requests["kind"] == kind] if kind else ttft_s


def overtaken(run: Run) -> str:
    counted = admission(run)
    if counted is None:
        return "- | - | -"
    return f"{counted.overtaken} | {counted.longest_wait_s:.0f} | {counted.by_age}"


def trace_rows(simulators: Simulators, spec: str, mode: Mode, blocks: int) -> list[str]:
    cases = [(SLOW, FCFS), *((SLOW, bounded(age_s)) for age_s in BOUNDS_S)]
    cases += [(speed, core) for speed in (1.0, 2.0) for core in (FCFS, bounded(300.0))]
    runs = replayed(simulators, spec, [settings(mode, blocks, speed, core) for speed, core in cases])
    rows = [
        "| engine | order | hit % | mean TTFT s | p50 | p99 | max | overtaken | longest extra wait s | by the bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (speed, core), run in zip(cases, runs, strict=True):
        requests, ttft_s = run.table("requests"), times(run)
        share = 100 * requests["hit_tokens"].sum() / requests["prompt_tokens"].sum()
        rows.append(
            f"| {speed:g} | {order(core)} | {share:.2f} | {ttft_s.mean():.1f} | {np.median(ttft_s):.1f} | "
            f"{np.percentile(ttft_s, 99):.1f} | {ttft_s.max():.1f} | {overtaken(run)} |"
        )
        print(rows[-1], flush=True)
    return rows


def harm_rows(simulators: Simulators, mode: Mode) -> list[str]:
    rows = [
        "| load | order | hit % | mean TTFT s | of hot | of cold | p99 of cold | overtaken | longest extra wait s | "
        "by the bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cores: Sequence[dict[str, Any]] = (FCFS, bounded(10.0), bounded(300.0))
    for name, (spec, blocks) in HARM.items():
        runs = replayed(simulators, spec, [settings(mode, blocks, SLOW, core) for core in cores])
        for core, run in zip(cores, runs, strict=True):
            requests, cold_s = run.table("requests"), times(run, "cold")
            share = 100 * requests["hit_tokens"].sum() / requests["prompt_tokens"].sum()
            rows.append(
                f"| {name} | {order(core)} | {share:.1f} | {times(run).mean():.1f} | "
                f"{times(run, 'hot').mean():.1f} | {cold_s.mean():.1f} | {np.percentile(cold_s, 99):.1f} | "
                f"{overtaken(run)} |"
            )
            print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("trace", type=Path, help="Mooncake JSONL")
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--mode", default="jump", choices=MODES)
    options = parser.parse_args()
    spec = f"trace:path={options.trace},limit={options.limit}"
    with Simulators() as simulators:
        trace = trace_rows(simulators, spec, options.mode, options.blocks)
        harm = harm_rows(simulators, options.mode)
    command = f"python tests/bench/admission.py {options.trace.name} --limit {options.limit}"
    text = [
        "# Admission by cached prefix",
        "",
        f"`{command} --blocks {options.blocks} --mode {options.mode}`, {time.strftime('%Y-%m-%d')}, vLLM "
        f"{installed_version()}, Python {sys.version.split()[0]}, {this_host().cpu}",
        "",
        f"Replay with vLLM's own scheduler, {MODEL}, blocks of {BLOCK}, chunks of 8,192 tokens, the core's defaults "
        "but for `core.admission=longest_prefix` and its bound `core.admission_age_s`. Longest extra wait: from the "
        "first admission that passed a request until the last one's turn was over. By the bound: admissions that the "
        "bound decided against somebody with more in the cache.",
        "",
        f"## The trace's first {options.limit} requests, {options.blocks} blocks",
        "",
        *trace,
        "",
        f"## Who pays: made loads, engine at {SLOW:g}",
        "",
        *harm,
        "",
        WORDS,
    ]
    TABLE.write_text("\n".join(text))
    print(TABLE.read_text())
    return 0


WORDS = """It gains where the pool is turned over while requests wait: what a prompt would find now is gone later.
Time to the first token then falls for everybody, the overtaken included, because less is computed. A bound that is
short beside the wait takes most of that away again.

It harms
- where nothing would be lost by waiting (one hot prefix that is always cached): hits stay what they were, the hot
  requests go first, and the cold ones pay for it with up to the bound;
- where the requests with most in the cache also have most to compute: short cold prompts wait behind long ones, and
  the mean time to the first token rises by far. What is left to compute is not looked at.

So it is off by default, `kvtune tune` tries it only with `--admission`, and a run shows how many were overtaken.
"""


if __name__ == "__main__":
    sys.exit(main())
