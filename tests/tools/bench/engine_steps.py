"""CPU time of real engines' steps side by side: in turns, ratios of pairs to the first engine's.

    python tests/tools/bench/engine_steps.py packed [--model tiny-granite] [--turns 20] [--states 1,4]

Blocks of aggregate size against stock's layout, new prompts in each turn. One process a side, all alive at once; in a
turn each serves the same requests while the others wait. CPU time of the whole process (all threads), so that what else
runs on the machine matters little. Prints Markdown: ratios, 95 % intervals.
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

REQUESTS, OUTPUT = 8, 24
WARM_TURNS = 3  # stock keeps a window at a prefix when it has seen the prefix twice
PREFIX = {"packed": 0}
NEW = {"packed": 300}
FLAGS = [
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "512",
    "--max-model-len",
    "4096",
    "--enable-prefix-caching",
]


def serve(model: str, what: str, core: str, settings: dict[str, Any]) -> None:
    """A child: builds one engine, then answers each line (a seed) with CPU milliseconds of its steps."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's log
    os.environ |= {
        "KVTUNE_CORE": core, "KVTUNE_SET": json.dumps(settings), "KVTUNE_STRICT": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.request import Request, SamplingParams

    from kvtune.core import state
    from kvtune.engine.front_end.config import engine_config, parse_engine_args
    from kvtune.engine.resolve import resolve

    args = resolve(model, dummy=True, engine_args=["--distributed-executor-backend", "uni", *FLAGS]).args
    config = engine_config(parse_engine_args(args))
    engine = EngineCore(config, UniProcExecutor, log_stats=False)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    hasher = get_request_block_hasher(engine.scheduler.hash_block_size, hash_function)
    groups = len(engine.scheduler.kv_cache_config.kv_cache_groups)
    if settings.get("packed") and not state.state()["parts"].get("packed"):
        raise SystemExit("blocks were not packed")
    print(json.dumps({"groups": groups, "block": engine.scheduler.block_size}), file=out)
    always = np.random.default_rng(0).integers(3, 4000, (REQUESTS, PREFIX[what])).tolist()
    for line in sys.stdin:
        draw = np.random.default_rng(1 + int(line))
        for number in range(REQUESTS):
            engine.add_request(
                Request(
                    request_id=f"{line.strip()}-{number}",
                    prompt_token_ids=[*always[number], *draw.integers(3, 4000, NEW[what]).tolist()],
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


def sides_of(what: str, states: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name: core and its settings; the first one is what the others are compared with."""
    sides: dict[str, tuple[str, dict[str, Any]]] = {"stock's blocks": ("kvtune", {"whole_states": True})}
    for k in map(int, states.split(",")):
        sides[f"packed, {k}"] = ("kvtune", {"packed": True, "states_per_block": k})
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("what", choices=list(NEW))
    parser.add_argument("--model", default="")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--states", default="1,4")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    model = given.model or {"packed": "tiny-granite"}[given.what]
    if given.serve:
        serve(model, given.what, *json.loads(given.serve))
        return
    layouts = sides_of(given.what, given.states)
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__, given.what, "--model", model, "--serve", json.dumps(side)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for name, side in layouts.items()
    }  # fmt: skip
    facts = {name: answer(child) for name, child in children.items()}
    by_layout: dict[str, list[dict[str, float]]] = {name: [] for name in layouts}
    for turn in range(given.turns + WARM_TURNS):
        order = list(layouts)
        for name in order if turn % 2 else reversed(order):
            stdin = children[name].stdin
            assert stdin is not None
            stdin.write(f"{turn}\n")
            stdin.flush()
            told = answer(children[name])
            if turn >= WARM_TURNS:
                by_layout[name].append(told)
    for child in children.values():
        child.kill()
    base = next(iter(layouts))
    prompt = f"{PREFIX[given.what]} shared + {NEW[given.what]}"
    print(f"{model}, {given.turns} turns of {REQUESTS} requests of {prompt} + {OUTPUT} tokens, CPU time\n")
    print(
        f"| side | block | groups | decode step, ms | over {base} | prompts, ms | over {base} |\n"
        + "|---" * 7
        + "|"
    )
    for name, rows in by_layout.items():
        cells = []
        for figure in ("decode_ms", "prefill_ms"):
            of_side, first = (np.array([row[figure] for row in r]) for r in (rows, by_layout[base]))
            cells += [f"{np.median(of_side):.2f}", "1" if name == base else interval(of_side / first)]
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
