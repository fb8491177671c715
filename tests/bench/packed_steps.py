"""Step times of packed blocks against stock's layout: real engines side by side, in turns, ratios of pairs.

`python tests/bench/packed_steps.py [--model tiny-granite] [--turns 20] [--states 1,4]`. One process a layout, all
alive at once; in a turn each serves the same fresh requests while the others wait. CPU time of the whole process (all
threads), so that what else runs on the machine matters little. Prints Markdown: ratios to stock's, 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

REQUESTS, PROMPT, OUTPUT = 8, 300, 24
FLAGS = [
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "512",
    "--max-model-len",
    "4096",
    "--enable-prefix-caching",
]


def serve(model: str, settings: dict[str, Any]) -> None:
    """A child: builds one engine, then answers each line (a seed) with CPU milliseconds of its steps."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's log
    os.environ |= {
        "KVTUNE_CORE": "kvtune", "KVTUNE_SET": json.dumps(settings), "KVTUNE_STRICT": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.request import Request, SamplingParams

    from kvtune.core import state
    from kvtune.engine.host import parse_engine_args
    from kvtune.engine.resolve import resolve

    args = resolve(model, dummy=True, engine_args=["--distributed-executor-backend", "uni", *FLAGS]).args
    config = parse_engine_args(args).create_engine_config()
    engine = EngineCore(config, UniProcExecutor, log_stats=False)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    hasher = get_request_block_hasher(engine.scheduler.hash_block_size, hash_function)
    groups = len(engine.scheduler.kv_cache_config.kv_cache_groups)
    packed = bool(state.state()["parts"].get("packed"))
    print(json.dumps({"groups": groups, "block": engine.scheduler.block_size, "packed": packed}), file=out)
    for line in sys.stdin:
        draw = np.random.default_rng(int(line))
        for number in range(REQUESTS):
            engine.add_request(
                Request(
                    request_id=f"{line.strip()}-{number}",
                    prompt_token_ids=draw.integers(3, 4000, PROMPT).tolist(),
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True),
                    pooling_params=None,
                    arrival_time=time.time(),
                    block_hasher=hasher,
                )
            )
        decode, prefill = [], 0.0
        while engine.scheduler.has_requests():
            begun = time.process_time()
            outputs, _ = engine.step_fn()
            spent = 1e3 * (time.process_time() - begun)
            made = sum(len(batch.outputs) for batch in (outputs or {}).values())
            if made == REQUESTS:
                decode.append(spent)
            else:
                prefill += spent
        print(json.dumps({"decode_ms": float(np.median(decode)), "prefill_ms": prefill}), file=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-granite")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--states", default="1,4")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.model, json.loads(given.serve))
        return
    layouts: dict[str, dict[str, Any]] = {"stock": {"whole_states": True}}
    for states in map(int, given.states.split(",")):
        layouts[f"packed, {states}"] = {"packed": True, "states_per_block": states}
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--model", given.model, "--serve", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for name, settings in layouts.items()
    }  # fmt: skip
    facts = {name: answer(child) for name, child in children.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in layouts}
    for turn in range(given.turns + 1):
        order = list(layouts)
        for name in order if turn % 2 else reversed(order):
            stdin = children[name].stdin
            assert stdin is not None
            stdin.write(f"{turn}\n")
            stdin.flush()
            told = answer(children[name])
            if turn:  # the first one warms up
                found[name].append(told)
    for child in children.values():
        child.kill()
    print(
        f"{given.model}, {given.turns} turns of {REQUESTS} requests of {PROMPT} + {OUTPUT} tokens, CPU time\n"
    )
    print(
        "| layout | block | groups | decode step, ms | over stock | prompts, ms | over stock |\n"
        + "|---" * 7
        + "|"
    )
    for name, rows in found.items():
        cells = []
        for figure in ("decode_ms", "prefill_ms"):
            own, base = (np.array([row[figure] for row in r]) for r in (rows, found["stock"]))
            cells += [f"{np.median(own):.2f}", "1" if name == "stock" else interval(own / base)]
        print(f"| {name} | {facts[name]['block']} | {facts[name]['groups']} | {' | '.join(cells)} |")


def answer(child: Any) -> Any:
    line = child.stdout.readline()
    if not line:
        raise SystemExit("an engine ended; run the child with --serve to see why")
    return json.loads(line)


def interval(ratios: Any) -> str:
    """Mean of the pairs' ratios, and its 95 % interval by bootstrap."""
    draw = np.random.default_rng(0)
    means = [draw.choice(ratios, len(ratios)).mean() for _ in range(4000)]
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{ratios.mean():.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
