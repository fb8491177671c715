"""Predicted against real: a step cost fitted to one engine run, and what it says of two others that it never saw.

`python tests/tools/bench/predict.py [--model tiny-gemma3] [--core stock] [--keep FOLDER]`, idle machine: three engine
starts, three minutes; their run files stay in FOLDER.
`python tests/tools/bench/predict.py RUN..`: recorded runs instead, the first is the one that the cost is fitted to.
A line a workload: mean time to first token of the engine and of the simulator, hits of both, whether the prediction is
marked valid, and the CPU seconds of the replay beside the engine's wall seconds (of both without the start).
Exits with 1 when a prediction that is marked valid is more than 10 % off, or hits differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from kvtune.engine.like import cost_of
from kvtune.engine.profile import EngineBench
from kvtune.engine.setup import Load, Setup
from kvtune.run.file import read_run
from kvtune.run.types import Run
from kvtune.workload.spec import build
from kvtune.workload.types import Workload

FITTED = "mix:prefixes=3,prefix=1200,requests=40,cold=1600,concurrency=3,output=24"
HELD_OUT = (
    "rounds:prefixes=5,prefix=2000,suffix=64,output=16,rounds=3",
    "zipf:prefixes=6,prefix=900,suffix=80,requests=30,concurrency=4,output=20",
)
FLAGS = ["--distributed-executor-backend", "uni", "--block-size", "32", "--max-num-batched-tokens", "1024"]
# The engine's core computes in its own thread, whose CPU clock the cost is fitted to.
ONE_THREAD = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def setup_of(model: str, core: str, workload: str) -> Setup:
    return Setup(
        model=model,
        load=Load.of(build(workload, seed=0)),
        core="stock" if core == "stock" else "kvtune",
        engine_args=list(FLAGS),
    )


def first_token_ms(run: Run) -> float:
    requests = run.table("requests")
    return float(np.nanmean(requests["first_token_s"] - requests["sent_s"])) * 1e3


def cpu_s(workload: Workload, settings: Setup) -> tuple[Run, float]:
    from kvtune.sim.replay import replay

    begin = time.process_time()
    run = replay(workload, settings)
    return run, time.process_time() - begin


def compare(real: Run, fitted: Run) -> bool:
    """Print one line; whether the prediction is worth its mark and the hits are the engine's."""
    info, core = real.header.workload, real.header.core
    wanted = Setup(
        model=real.header.model,
        load=Load.of(build(info.spec, seed=info.seed)),
        core="stock" if core.name == "stock" else "kvtune",
        core_settings=core.settings,
    )
    like = Run(msgspec.structs.replace(fitted.header, engine=real.header.engine), fitted.tables)
    settings = wanted.like(like).sized()
    nothing = build("decode:requests=1,prompt=8,output=1", seed=0)
    start = min(cpu_s(nothing, settings)[1] for _ in range(3))
    simulated, cpu = min((cpu_s(wanted.load.built(), settings) for _ in range(3)), key=lambda found: found[1])
    cpu = max(cpu - start, 1e-3)
    requests = real.table("requests")
    wall = float(np.nanmax(requests["finished_s"]) - np.nanmin(requests["sent_s"]))
    one, other = first_token_ms(real), first_token_ms(simulated)
    same = np.array_equal(requests["hit_tokens"], simulated.table("requests")["hit_tokens"])
    valid = simulated.header.valid.timings
    print(
        f"{info.spec:<84} engine {one:8.1f} ms  predicted {other:8.1f} ms  {other / one - 1:+6.1%}  "
        f"{'valid' if valid else 'marked invalid'}  hits {'equal' if same else 'DIFFER'}  "
        f"engine {wall:6.2f} s, replay {cpu:6.3f} CPU-s (start {start:.3f}): {wall / cpu:5.0f}x",
        flush=True,
    )
    return same and not (valid and abs(other / one - 1) > 0.1)


def measured(model: str, core: str, workload: str, folder: Path) -> Run:
    profiled = EngineBench(folder, environment=ONE_THREAD).run(setup_of(model, core, workload))
    if profiled.error is not None:
        raise profiled.error
    return profiled.run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--model", default="tiny-gemma3")
    parser.add_argument("--core", default="stock")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.runs:
            runs = [read_run(path) for path in options.runs]
        else:
            specs = (FITTED, *HELD_OUT)
            runs = [measured(options.model, options.core, spec, options.keep or Path(name)) for spec in specs]
    cost = cost_of(runs[0])
    print(
        f"step: {cost.step_us:.0f} us + {cost.prefill_token_us:.1f} a prompt token + {cost.decode_us:.1f} a decode "
        f"+ {cost.kv_token_us:.4f} a KV token; a prefill: {cost.prefill_step_us:.0f} us + {cost.prefill_kv_us:.4f} a "
        f"prompt token and KV token; between steps {cost.between_us:.0f} us, to the engine {cost.enter_us:.0f} us, "
        f"back {cost.leave_us:.0f} us; {cost.steps} steps, {cost.clock} clock, {cost.machine}; "
        f"held out {cost.held_out_share:.1%}, unexplained {cost.unexplained_share:.1%}"
    )
    good = [compare(run, runs[0]) for run in runs]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
