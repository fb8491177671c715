"""Writes tests/data/bench_forward.json by vLLM 0.33's own `bench forward`: its cases, statistics and writer.

The engine, and the graph that a GPU would run, are replaced: a case takes the time of TRUE_US, with noise.
In an environment with vLLM 0.33 (.ci/versions): python -m tests.tools.contracts.bench_forward FILE
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
import vllm.config
import vllm.distributed.parallel_state as groups
from vllm.utils.argparse_utils import FlexibleArgumentParser

CASES = (
    *("decode1=1*1@4096", "decode8=8*1@4096", "decode24=24*1@8192", "prefill=512", "prefill2k=2048"),
    *("hit=2048@10240", "chunk=4096@20480c", "mix=1024,8*1@8192"),
)
STEP_US, TOKEN_US, DECODE_US, KV_US, ATTENDED_US = 9000.0, 55.0, 40.0, 0.0003, 0.0002
NOISE = 0.004


def true_us(requests: Any) -> float:
    decodes = [one for one in requests if one.is_decode]
    prompts = [one for one in requests if not one.is_decode]
    time_us = STEP_US + DECODE_US * len(decodes) + KV_US * sum(one.prefix_len for one in decodes)
    time_us += TOKEN_US * sum(one.query_len for one in prompts)
    attended = (one.query_len * (one.prefix_len + one.query_len / 2) for one in prompts)
    return float(time_us + ATTENDED_US * sum(attended))


def main() -> None:
    world = SimpleNamespace(rank=0, world_size=1, cpu_group=None, device_group=None)
    groups.get_world_group = lambda: world
    vllm.config.set_current_vllm_config = lambda config: contextlib.nullcontext()
    runner = SimpleNamespace(model_config=SimpleNamespace(max_model_len=131_072), vllm_config=None)
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    engine = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
    vllm.LLM = SimpleNamespace(from_engine_args=lambda args: engine)
    torch.distributed.all_gather_object = lambda into, one, group: into.__setitem__(0, one)
    torch.distributed.all_reduce = lambda *given, **named: None

    from vllm.benchmarks.forward import capture
    from vllm.benchmarks.forward import main as forward

    noise = np.random.default_rng(0)

    def run_case(runner: Any, case: Any, args: Any) -> dict[str, Any]:
        bench: Any = object.__new__(capture.ForwardBench)
        bench.iters, bench.samples, bench.device = args.iters, args.samples, "cpu"
        took_ms = lambda end: true_us(case.requests) * (1 + NOISE * noise.standard_normal()) / 1000  # noqa: E731
        event = SimpleNamespace(synchronize=lambda: None, elapsed_time=took_ms)
        bench._events, bench._warmup = (event, event), lambda graph: None
        same = torch.ones(4)
        return {
            "num_tokens": case.num_tokens,
            "kv_blocks": sum(-(-one.kv_len // 16) for one in case.requests),
            "routing": "balanced",
            "num_local_tokens": case.num_tokens,
            "num_tokens_after_padding": case.num_tokens,
            "batch_order": [f"bench-{at}" for at in range(len(case.requests))],
            "timing_scope": "target_only",
            "eager_repeat": capture._compare(same, same),
            "graph_vs_eager": capture._compare(same, same),
            "graph_deterministic": True,
            "finite": True,
            "state_reset_bytes": 65_536,
            "latency_us": bench._time(SimpleNamespace(replay=lambda: None)),
        }

    forward.run_case = run_case
    forward._make_engine_args = lambda args, cases: None
    parser = FlexibleArgumentParser()
    forward.add_cli_args(parser)
    words = [word for case in CASES for word in ("--case", case)]
    forward.main(parser.parse_args([*words, "--iters", "2", "--samples", "2", "--output-json", sys.argv[1]]))


if __name__ == "__main__":
    main()
