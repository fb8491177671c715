"""The real engine and the simulated one, step by step: same blocks in every step, same hits of every request.

One engine start for all of tiny-gemma3: some 20 s, and half as long to compute the workloads with both cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.real import lockstep
from tests.tools.bench.loads import write

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FLAGS = [
    "--block-size",
    "32",
    "--max-num-batched-tokens",
    "512",
    "--max-num-seqs",
    "16",
    "--max-model-len",
    "1000",
]
# (workload, blocks, how many hits and preemptions make the case worth something)
CASES: list[tuple[str, int, bool, bool]] = [
    ("rounds:prefixes=3,prefix=700,suffix=40,output=8,rounds=3", 400, True, False),
    ("zipf:prefixes=6,prefix=500,suffix=40,requests=14,concurrency=4,output=12", 180, True, False),
    ("chat:sessions=4,turns=3,system=64,first=200,user=40,output=40", 200, True, False),
    ("mix:prefixes=2,prefix=500,requests=10,cold=600,concurrency=3,output=6", 180, False, False),
    ("decode:requests=14,prompt=48,output=90", 145, False, True),
    ("prefill:requests=4,prompt=900,output=3", 150, False, False),
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lockstep")
    cases = [{"workload": work, "blocks": blocks} for work, blocks, _, _ in CASES]
    job = {"model": "tiny-gemma3", "cores": ["stock", "kvtune"], "args": FLAGS, "cases": cases}
    results: list[dict[str, Any]] = lockstep(folder, job)["cases"]
    return results


@pytest.mark.parametrize("core", ["stock", "kvtune"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=[c[0].split(":")[0] for c in CASES])
def test_every_step_and_every_hit_equals_the_engines(
    compared: list[dict[str, Any]], number: int, core: str
) -> None:
    work, _, hits_expected, preemptions_expected = CASES[number]
    case = next(c for c in compared if c["workload"] == work and c["core"] == core)
    real, simulated = case["hits"]
    assert simulated == real
    steps, simulated_steps = case["digests"]
    assert simulated_steps == steps and len(steps) > 10
    assert case["pool"] == case["sim_pool"]
    assert min(real) >= 0
    if hits_expected:
        assert sum(real) > 0
    computed_twice, simulated_twice = case["computed_twice"]
    assert simulated_twice == computed_twice
    if preemptions_expected:
        assert case["preemptions"] > 0 and sum(sum(one.values()) for one in computed_twice.values()) > 0


def test_both_cores_were_compared(compared: list[dict[str, Any]]) -> None:
    pools = {c["core"]: c["pool"] for c in compared}
    assert pools["stock"] == "BlockPool" and pools["kvtune"] != "BlockPool"


def test_both_cores_answer_alike(compared: list[dict[str, Any]]) -> None:
    answers = {(c["core"], c["workload"]): c["answers"] for c in compared}
    for work, *_ in CASES:
        ours = answers["kvtune", work]
        assert ours == answers["stock", work]
        assert len({tuple(answer) for answer in ours}) > 1


# What older defaults lost on, made smaller: conversations that end, and hot prefixes that change.
TRAFFIC = [
    "--block-size",
    "32",
    "--max-num-batched-tokens",
    "1024",
    "--max-num-seqs",
    "16",
    "--max-model-len",
    "2600",
]
TRAFFIC_LOADS: dict[str, dict[str, Any]] = {
    "sessions": {"kind": "sessions", "sessions": 12, "turns": 4, "new": 1, "think_s": 6.0, "every_s": 4.0},
    "phases": {
        "kind": "phases", "hot": 4, "nodes": 2, "requests": 40, "stays": 20, "skew": 0.0, "suffix": 48, "every_s": 2.0,
    },
}  # fmt: skip
TRAFFIC_BLOCKS = 420


@pytest.mark.full
def test_sessions_and_phases_hit_as_in_the_replay_and_no_less_than_stock(tmp_path: Path) -> None:
    loads = [{"seed": 0, "parts": [{"start_s": 0.0, "output": 8, **part}]} for part in TRAFFIC_LOADS.values()]
    cases = [{"workload": write(load, tmp_path), "blocks": TRAFFIC_BLOCKS} for load in loads]
    job = {"model": "tiny-gemma3", "cores": ["stock", "kvtune"], "args": TRAFFIC, "cases": cases}
    results = lockstep(tmp_path, job)["cases"]
    hits: dict[tuple[str, str], int] = {}
    for case in results:
        assert case["hits"][0] == case["hits"][1] and case["digests"][0] == case["digests"][1]
        hits[case["core"], case["workload"]] = sum(case["hits"][0])
    for case in cases:
        stock, ours = hits["stock", case["workload"]], hits["kvtune", case["workload"]]
        assert ours >= stock > 0
    assert len(hits) == 4


# A hybrid's block holds a whole state: 256 tokens, or 384 where the CPU's rule keeps states in float32.
STATES = ["--max-num-batched-tokens", "1024", "--max-num-seqs", "16", "--max-model-len", "2400"]
STATE_CASES = [
    ("rounds:prefixes=2,prefix=1200,suffix=40,output=4,rounds=3", 60),
    ("chat:sessions=3,turns=3,system=64,first=700,user=40,output=20", 40),
]


@pytest.mark.full
def test_states_of_either_type_are_replayed_step_by_step(tmp_path: Path, avx512_bf16: bool) -> None:
    cases = [{"workload": work, "blocks": blocks} for work, blocks in STATE_CASES]
    job = {"model": "tiny-qwen3next", "cores": ["stock", "kvtune"], "args": STATES, "cases": cases}
    results = lockstep(tmp_path, job)["cases"]
    assert len(results) == 4
    for case in results:
        assert case["block"] == (384 if avx512_bf16 else 256)
        assert case["hits"][0] == case["hits"][1] and sum(case["hits"][0]) > 0
        assert case["digests"][0] == case["digests"][1] and len(case["digests"][0]) > 10
