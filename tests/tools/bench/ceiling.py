"""How many tokens a second this host can drive at most: stock and kvtune's core, in alternating pairs.

    python tests/tools/bench/ceiling.py  # five pairs; each run starts vLLM's processes, without a model
    python tests/tools/bench/ceiling.py 2 decode:requests=256,prompt=16,output=100

On a device that takes no time (docs/host.md). Ratios are of pairs: geometric means with 95 % intervals by Student's t.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[3]))

from kvtune.analysis.run import RunAnalysis
from kvtune.engine.experiment import order
from kvtune.engine.profile import EngineBench
from kvtune.engine.setup import Load, Setup
from kvtune.errors import KvtuneError
from kvtune.fake_device.settings import constant
from kvtune.run.machine import this_host
from kvtune.workload.spec import build
from tests.tools.bench.ratio import ratio

LOAD = "decode:requests=1024,prompt=16,output=200"
PAIRS = 5
FIGURES = (
    "EngineCore, CPU us a token",
    "front end, CPU us a token",
    "ceiling, tokens/s",
    "measured, tokens/s",
)

Core = Literal["kvtune", "stock"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's figures, in the order of FIGURES."""

    values: tuple[float, ...]
    process: str


def measured(core: Core, load: str, folder: Path) -> Measured:
    """One run on a device that takes no time."""
    job = Setup(model="tiny-opt", load=Load.of(build(load)), core=core, device=constant(0.0))
    done = EngineBench(folder).run(job)
    if done.error is not None:
        raise done.error
    analysis = RunAnalysis(done.run)
    ceiling = analysis.ceiling
    if ceiling is None:
        raise KvtuneError("the run was too short to measure CPU time a token", "give a longer load")
    us = ceiling.cpu_us_per_token
    values = (us["engine_core"], us["front_end"], ceiling.tokens_s, analysis.latency.throughput_tok_s)
    return Measured(tuple(math.nan if value is None else value for value in values), ceiling.process)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    load = sys.argv[2] if len(sys.argv) > 2 else LOAD
    host = this_host()
    print(f"tiny-opt {load}, {host.cpu}, {host.cores} cores\n")
    print(f"| pair | core | {' | '.join(FIGURES)} | set by |\n|{'---|' * (len(FIGURES) + 3)}")
    runs: dict[Core, list[Measured]] = {"stock": [], "kvtune": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair, at in order(2, pairs):
            core = list(runs)[at]
            run = measured(core, load, Path(folder))
            runs[core].append(run)
            cells = " | ".join(f"{value:,.4g}" for value in run.values)
            print(f"| {pair + 1} | {core} | {cells} | {run.process} |", flush=True)
    print("\n| kvtune / stock | ratio | 95 % interval |\n|---|---|---|")
    for at, figure in enumerate(FIGURES):
        middle, low, high = ratio(*([run.values[at] for run in runs[core]] for core in ("stock", "kvtune")))
        print(f"| {figure} | {middle:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    main()
