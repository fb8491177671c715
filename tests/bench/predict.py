"""Predicted against real: a step cost fitted to one engine run, and what it says of two others that it never saw.

`python tests/bench/predict.py [--model tiny-gemma3] [--core stock]`, idle machine: three engine starts, two minutes.
A line a workload: mean time to first token of the engine and of the simulator, hits of both, whether the prediction is
marked valid, and how many CPU seconds the replay took beside the engine's wall seconds for the same requests.
Exits with 1 when a prediction that is marked valid is more than 10 % off, or hits differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvtune.engine.profile import Job, profile
from kvtune.run.types import Run
from kvtune.sim.profile import cost_of, settings_for
from kvtune.workload.spec import build

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


def job(model: str, core: str, workload: str, folder: Path) -> Job:
    return Job(
        model=model,
        workload=build(workload, seed=0),
        core="stock" if core == "stock" else "kvtune",
        engine_args=FLAGS,
        output=folder,
        environment=ONE_THREAD,
    )


def first_token_ms(run: Run) -> float:
    requests = run.table("requests")
    return float(np.nanmean(requests["first_token_s"] - requests["sent_s"])) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny-gemma3")
    parser.add_argument("--core", default="stock")
    options = parser.parse_args()
    bad = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fitted = profile(job(options.model, options.core, FITTED, folder))
        if fitted.error is not None:
            raise fitted.error
        cost = cost_of(fitted.run)
        print(
            f"step: {cost.step_us:.0f} us + {cost.prefill_token_us:.1f} a prompt token + {cost.decode_us:.1f} a decode "
            f"+ {cost.kv_token_us:.4f} a KV token; {cost.steps} steps, {cost.clock} clock, {cost.machine}; "
            f"held out {cost.held_out_share:.1%}, unexplained {cost.unexplained_share:.1%}"
        )
        from kvtune.sim.replay import replay

        for workload in (FITTED, *HELD_OUT):
            wanted = job(options.model, options.core, workload, folder)
            real = fitted.run if workload == FITTED else profile(wanted).run
            settings = settings_for(wanted, "exact", fitted.run)
            replay(build("decode:requests=1,prompt=8,output=2", seed=0), settings)  # imports
            cpu = time.process_time()
            simulated = replay(wanted.workload, settings)
            cpu = time.process_time() - cpu
            requests = real.table("requests")
            wall = float(np.nanmax(requests["finished_s"]) - np.nanmin(requests["sent_s"]))
            one, other = first_token_ms(real), first_token_ms(simulated)
            same = np.array_equal(requests["hit_tokens"], simulated.table("requests")["hit_tokens"])
            valid = simulated.header.valid.timings
            print(
                f"{workload:<84} engine {one:8.1f} ms  predicted {other:8.1f} ms  {other / one - 1:+6.1%}  "
                f"{'valid' if valid else 'marked invalid'}  hits {'equal' if same else 'DIFFER'}  "
                f"engine {wall:6.2f} s, replay {cpu:6.3f} CPU-s: {wall / cpu:5.0f}x",
                flush=True,
            )
            bad |= (valid and abs(other / one - 1) > 0.1) or not same
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
