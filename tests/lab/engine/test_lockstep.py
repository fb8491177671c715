"""The real engine and the simulated one, step by step, with both cores: the same blocks and hits in every step.

One engine start a model: some 20 s, and half as long to compute the loads. Pools are small, so that blocks run out;
prompts come in chunks. In `make test` recorded engines are replayed instead (tests/lab/sim/test_profile_sim.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.engine.real import lockstep

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

# Seeded weights of real scale: with dummy ones some models answer everything alike.
SEEDED = ["--load-format", "kvtune-seeded"]
FLAGS = ["--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--max-model-len", "1000", *SEEDED]
# A hybrid's block holds a whole state; what is kept of a prompt are the states at its chunks' ends.
STATES = ["--max-num-batched-tokens", "1024", "--max-num-seqs", "16", "--max-model-len", "2400", *SEEDED]
ROUNDS = "rounds:prefixes=3,prefix=700,suffix=40,output=8,rounds=3"
ZIPF = "zipf:prefixes=6,prefix=500,suffix=40,requests=14,concurrency=4,output=12"
CHAT = "chat:sessions=4,turns=3,system=64,first=200,user=40,output=40"
MIX = "mix:prefixes=2,prefix=500,requests=10,cold=600,concurrency=3,output=6"
DECODE = "decode:requests=14,prompt=48,output=90"
PREFILL = "prefill:requests=4,prompt=900,output=3"
TRACE = "trace:path={trace}"
ATTENTION = [(ROUNDS, 110), (ZIPF, 80), (CHAT, 80), (MIX, 80), (DECODE, 45), (PREFILL, 60), (TRACE, 70)]
WINDOWS = [(ROUNDS, 400), (ZIPF, 180), (CHAT, 200), (MIX, 180), (DECODE, 145), (PREFILL, 150), (TRACE, 200)]
STATE = [(ROUNDS.replace("700", "2100"), 60), (ZIPF, 30), (CHAT.replace("first=200", "first=900"), 40)]
STATE += [(MIX, 30), (DECODE, 20), (PREFILL, 20), (TRACE, 30)]
# A block of tiny-granite holds 1280 tokens.
WHOLE = [
    (ROUNDS.replace("700", "2100"), 60),
    (CHAT.replace("first=200", "first=1600"), 40),
    *STATE[1:2],
    *STATE[3:],
]
MODELS = {
    "tiny-opt": (["--block-size", "32", *FLAGS], ATTENTION),
    "tiny-llama": (["--block-size", "32", *FLAGS], ATTENTION),
    "tiny-gemma3": (["--block-size", "32", *FLAGS], WINDOWS),
    "tiny-qwen3next": (STATES, STATE),
    "tiny-granite": ([*STATES, "--enable-prefix-caching"], WHOLE),
}
# Stock's engine cannot cache the prefixes of a Mamba-2 model on a CPU; without caching, stock on tiny-granite is in
# tests/plugin/core/cache/test_packed_identity.py.
CORES: dict[str, dict[str, Any]] = {
    "tiny-granite": {"cores": ["kvtune"], "core_settings": {"whole_states": True}}
}
BOTH = {"cores": ["stock", "kvtune"]}


def trace_file(folder: Path) -> Path:
    """Ten requests of up to 900 tokens that share their first 512, some at the same time."""
    lines = [
        {
            "timestamp": 40 * (i // 2),
            "input_length": 620 + 30 * (i % 5),
            "output_length": 5 + i % 4,
            "hash_ids": [i % 3, 100 + i],
        }
        for i in range(10)
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("model", MODELS)
def test_every_step_and_every_hit_equals_the_engines(model: str, tmp_path: Path) -> None:
    flags, loads = MODELS[model]
    trace = trace_file(tmp_path)
    cases = [{"workload": w.format(trace=trace), "blocks": blocks} for w, blocks in loads]
    job = {"model": model, "args": flags, "cases": cases, **CORES.get(model, BOTH)}
    results = lockstep(tmp_path, job)["cases"]
    assert len(results) == len(job["cores"]) * len(cases)
    answers: dict[str, list[list[int]]] = {}
    for case in results:
        what = f"{case['core']} {case['workload']}"
        real, simulated = case["hits"]
        assert simulated == real and min(real) >= 0, what
        steps, simulated_steps = case["digests"]
        assert simulated_steps == steps and len(steps) > 3, what
        assert case["pool"] == case["sim_pool"], what
        assert (case["pool"] == "BlockPool") == (case["core"] == "stock" or loads[0] != WINDOWS[0]), what
        computed_twice, simulated_twice = case["computed_twice"]
        assert simulated_twice == computed_twice, what
        assert sum(sum(each.values()) for each in computed_twice.values()) > 0 or not case["preemptions"], (
            what
        )
        assert answers.setdefault(case["workload"], case["answers"]) == case["answers"], what
        assert len({tuple(answer) for answer in case["answers"]}) > 1, what
    hit = {case["workload"].partition(":")[0] for case in results if sum(case["hits"][0])}
    assert {"rounds", "chat"} <= hit
    if loads in (ATTENTION, WINDOWS):
        assert "zipf" in hit
        assert any(case["preemptions"] for case in results)
