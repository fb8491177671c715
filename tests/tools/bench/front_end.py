"""What vLLM's front end costs a token, by how callers take their answers; stock and core in alternating pairs.

    python tests/tools/bench/front_end.py    # five pairs of each mode at batch 1024
    python tests/tools/bench/front_end.py 2 --batch 64 --mode delta --interval 1 --interval 4 --interval 16
    python tests/tools/bench/front_end.py 3 --set '{"front_end": false}'   # the core without its front end

AsyncLLM on a device that takes no time (docs/host.md), vLLM's default metrics on. The front end while all requests
decode: from step 20 of the answers until 20 steps before their end. EngineCore from the first request to the last
answer. CPU time of whole processes; in the front end the callers' own loops are part of it: `async for output in
engine.generate(..)`, with a clock.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from time import monotonic_ns, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np
import psutil

from kvtune.engine.experiment import order
from kvtune.engine.models import builtin, engine_defaults
from kvtune.engine.profile import socket_folder
from kvtune.fake_device.settings import constant, write_device
from kvtune.run.machine import this_host
from tests.engine.serving import tokenizer_in
from tests.tools.bench.ratio import ratio

MODES = ("delta", "final", "delta text", "final text")
FIGURES = {
    "front_end_us": "front end, CPU us a token",
    "engine_core_us": "EngineCore, CPU us a token",
    "tokens_s": "tokens/s",
    "gen0": "young collections of the front end per 1,000 steps",
    "itl_p99_ms": "between chunks, p99 ms",
    "chunk": "tokens a chunk",
}
EDGE = 20
"""Steps at either end that are not measured."""


class Watch:
    """Reads the clocks when the measured steps begin and end, as vLLM's statistics tell of tokens."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.tokens = self.steps = 0
        self.read: list[tuple[float, ...]] = []

    def step(self, tokens: int) -> None:
        self.tokens += tokens
        self.steps += 1
        if (not self.read and self.tokens >= self.begin) or (len(self.read) == 1 and self.tokens >= self.end):
            young = gc.get_stats()[0]["collections"]
            self.read.append((monotonic_ns() / 1e9, process_time(), self.tokens, self.steps, young))

    def figures(self) -> dict[str, float]:
        wall, cpu, tokens, steps, young = (b - a for a, b in zip(*self.read, strict=True))
        return {
            "front_end_us": 1e6 * cpu / tokens,
            "tokens_s": tokens / wall,
            "gen0": 1000.0 * young / steps,
        }


async def measured(options: argparse.Namespace) -> dict[str, float]:
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    from kvtune.engine.front_end.config import engine_config, parse_engine_args
    from kvtune.fake_device.settings import read_device
    from kvtune.fake_device.shape import shape

    text = options.mode.endswith("text")
    flags = engine_defaults("tiny-opt")
    if text:
        del flags["skip-tokenizer-init"]
        flags["tokenizer"] = str(tokenizer_in(Path(os.environ["KVTUNE_RUN_DIR"])))
    words = [word for name, value in flags.items() for word in (f"--{name}", value) if word]
    words += [
        "--model",
        str(builtin("tiny-opt")),
        "--max-num-batched-tokens",
        "8192",
        "--max-num-seqs",
        "1024",
    ]
    config = engine_config(parse_engine_args([*words, "--stream-interval", str(options.interval)]))
    shape(config, read_device())
    count, output = options.batch, options.output
    watch = Watch(count * EDGE, count * (output - EDGE))

    class Steps(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if iteration_stats is not None:
                watch.step(iteration_stats.num_generation_tokens)

        def log_engine_initialized(self) -> None:
            pass

    engine = AsyncLLM.from_vllm_config(config, stat_loggers=[Steps])
    core = max(psutil.Process().children(), key=lambda child: child.memory_info().rss)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=output,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY
        if options.mode.startswith("final")
        else RequestOutputKind.DELTA,
        detokenize=text,
    )
    times = [array("q") for _ in range(count)]

    async def caller(number: int) -> int:
        came, tokens = times[number], 0
        prompt = tokens_input([2 + number % 100] * 16)
        async for chunk in engine.generate(prompt, params, str(number)):
            came.append(monotonic_ns())
            tokens += len(chunk.outputs[0].token_ids)
        return tokens

    used = core.cpu_times()
    try:
        answers = await asyncio.gather(*(caller(number) for number in range(count)))
        assert set(answers) == {output}, "an answer is incomplete"
        figures = watch.figures()
        after = core.cpu_times()
        cpu_s = after.user + after.system - used.user - used.system
        figures["engine_core_us"] = 1e6 * cpu_s / (count * output)
        figures["chunk"] = count * output / sum(map(len, times))
        edge = max(EDGE // options.interval, 1)
        gaps = np.concatenate([np.diff(np.array(came[edge:-edge])) for came in times])
        figures["itl_p99_ms"] = float(np.percentile(gaps, 99)) / 1e6 if len(gaps) else float("nan")
        return figures
    finally:
        engine.shutdown(timeout=1.0)


def run(core: str, mode: str, batch: int, interval: int, output: int, settings: str) -> dict[str, float]:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, socket_folder() as sockets:
        write_device(constant(0.0), Path(folder))
        environment = {
            **os.environ,
            **sockets,
            "KVTUNE_CORE": core,
            "KVTUNE_SET": settings,
            "KVTUNE_RECIPE": "",
            "KVTUNE_RUN_DIR": folder,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [sys.executable, __file__, "--measure", "--mode", mode, "--batch", str(batch)]
        command += ["--interval", str(interval), "--output", str(output)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        line = next((line for line in done.stdout.splitlines() if line.startswith("figures ")), "")
        if not line:
            raise SystemExit(f"{mode}, {core}: no figures\n{done.stderr[-3000:]}")
        figures: dict[str, float] = json.loads(line.removeprefix("figures "))
        return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--interval", type=int, action="append")
    parser.add_argument("--output", type=int, default=300)
    parser.add_argument("--set", default="", help="core settings of a third core, JSON")
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    if options.measure:
        options.mode, options.interval = options.mode[0], options.interval[0]
        print("figures", json.dumps(asyncio.run(measured(options))))
        return
    host = this_host()
    print(f"batch {options.batch}, {options.output} tokens; {host.cpu}, {host.cores} cores")
    sides = {"stock": ("stock", ""), "core": ("kvtune", "")}
    if options.set:
        sides[f"core {options.set}"] = ("kvtune", options.set)
    for mode, interval in itertools.product(options.mode or MODES, options.interval or (1,)):
        what = f"{mode}, stream interval {interval}"
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        print(
            f"\n{what}\n| pair | | {' | '.join(FIGURES.values())} | load |\n|{'---|' * (len(FIGURES) + 3)}",
            flush=True,
        )
        for pair, at in order(len(sides), options.pairs):
            side, (core, settings) = list(sides.items())[at]
            made = run(core, mode, options.batch, interval, options.output, settings)
            runs[side].append(made)
            cells = " | ".join(f"{made[figure]:,.4g}" for figure in FIGURES)
            print(f"| {pair + 1} | {side} | {cells} | {os.getloadavg()[0]:.1f} |", flush=True)
        print(
            f"\n{what}\n| | {' | '.join(sides)} | core / stock | 95 % interval |\n|{'---|' * (len(sides) + 3)}"
        )
        for figure, words in FIGURES.items():
            values = {side: [each[figure] for each in some] for side, some in runs.items()}
            cells = [f"{statistics.median(some):,.4g}" for some in values.values()]
            middle, low, high = ratio(*([max(v, 1e-9) for v in values[side]] for side in ("stock", "core")))
            print(f"| {words} | {' | '.join(cells)} | {middle:.3f} | {low:.3f} to {high:.3f} |", flush=True)


if __name__ == "__main__":
    main()
