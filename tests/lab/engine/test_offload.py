"""A tier of host memory behind a real CPU engine: the same answers as without, and every step as in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtune.data.recipe import engine_flags
from kvtune.lab.device.cost import INSTANT
from kvtune.lab.setup.setup import Setup
from kvtune.reading.analysis.offload import offload
from kvtune.requests.loads.spec import build
from tests.lab.engine.real import counts_as_vllm, lockstep, profiled
from tests.simulator import simulate

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

BLOCKS_OF_32 = ["--block-size", "32", "--max-num-batched-tokens", "512", "--max-num-seqs", "16"]
PLAIN = [*BLOCKS_OF_32, "--max-model-len", "1000"]
# Without it the tier has a window only where a prompt ends, and a shared prefix hits nothing.
WINDOWS = [*PLAIN, "--prefix-cache-retention-interval", "512"]
STATES = ["--max-num-batched-tokens", "1024", "--max-num-seqs", "16", "--max-model-len", "2400"]
CLOSE = 1e-3
# Weights with which answers depend on the whole prompt.
SEEDED = ["--load-format", "kvtune-seeded"]
TIER = ["--kv-offloading-size", "0.2"]
# (model, flags, [(workload, blocks, whether the tier must hit, whether requests must be preempted)])
Case = tuple[str, int, bool, bool]
MODELS: dict[str, tuple[list[str], list[Case]]] = {
    "tiny-llama": (
        PLAIN,
        [
            ("rounds:prefixes=4,prefix=700,suffix=40,output=8,rounds=3", 60, True, False),
            ("zipf:prefixes=6,prefix=500,suffix=40,requests=20,concurrency=4,output=12", 70, True, True),
            ("decode:requests=14,prompt=48,output=90", 50, False, True),
        ],
    ),
    "tiny-gemma3": (
        WINDOWS,
        [
            ("rounds:prefixes=6,prefix=700,suffix=40,output=8,rounds=3", 150, True, False),
            ("zipf:prefixes=8,prefix=500,suffix=40,requests=24,concurrency=4,output=12", 150, True, False),
            ("decode:requests=14,prompt=48,output=90", 145, False, True),
        ],
    ),
    "tiny-qwen3next": (
        STATES,
        [
            ("chat:sessions=6,turns=3,system=64,first=900,user=40,output=20", 40, True, False),
            ("rounds:prefixes=3,prefix=1200,suffix=40,output=4,rounds=3", 40, False, False),
        ],
    ),
}


def compared(model: str, folder: Path, tier: list[str]) -> list[dict[str, Any]]:
    flags, cases = MODELS[model]
    job = {
        "model": model,
        "cores": ["stock", "kvtune"],
        "args": [*flags, *SEEDED, *tier],
        "cases": [{"workload": work, "blocks": blocks} for work, blocks, _, _ in cases],
        "logprobs": True,
    }
    results: list[dict[str, Any]] = lockstep(folder, job)["cases"]
    return results


@pytest.mark.parametrize(
    "model",
    ["tiny-llama", "tiny-gemma3", "tiny-qwen3next"],
)
def test_every_step_with_a_tier_equals_the_simulators_and_every_answer_stocks(
    model: str, tmp_path: Path
) -> None:
    with_tier, without = compared(model, tmp_path, TIER), compared(model, tmp_path, [])
    assert len(with_tier) == len(without) == 2 * len(MODELS[model][1])
    must_be = {work: (hits, preempted) for work, _, hits, preempted in MODELS[model][1]}
    for case, plain in zip(with_tier, without, strict=True):
        assert case["hits"][0] == case["hits"][1], case["workload"]
        assert case["tier_hits"][0] == case["tier_hits"][1], case["workload"]
        assert case["copies"][0] == case["copies"][1], case["workload"]
        assert case["copies"][0]["stored_bytes"] > 0 == sum(plain["tier_hits"][0])
        assert case["digests"][0] == case["digests"][1] and len(case["digests"][0]) > 10
        assert furthest(case, plain) < CLOSE
        hits, preempted = must_be[case["workload"]]
        assert sum(case["hits"][0]) > sum(plain["hits"][0]) or not hits, case["workload"]
        assert sum(case["tier_hits"][0]) > 0 or not hits, case["workload"]
        assert case["preemptions"] > 0 or not preempted, case["workload"]


def test_decodes_take_their_short_path_with_a_tier_too(tmp_path: Path) -> None:
    """Requests whose log-probabilities are asked for do not take it, so the answers are compared as tokens here."""
    work = "rounds:prefixes=9,prefix=300,suffix=40,output=40,rounds=3,concurrency=4"
    job = {
        "model": "tiny-llama",
        "cores": ["kvtune"],
        "args": [*PLAIN, *SEEDED],
        "cases": [{"workload": work, "blocks": 60}],
        "audit": True,
    }
    (without,) = lockstep(tmp_path, job)["cases"]
    (case,) = lockstep(tmp_path, {**job, "args": [*PLAIN, *SEEDED, *TIER]})["cases"]
    assert case["digests"][0] == case["digests"][1] and case["hits"][0] == case["hits"][1]
    assert case["tier_hits"][0] == case["tier_hits"][1] and sum(case["tier_hits"][0]) > 1000
    assert case["copies"][0] == case["copies"][1]
    assert case["steady_steps"] > 20
    assert case["answers"] == without["answers"]


@pytest.mark.parametrize(
    "model",
    ["tiny-llama", "tiny-gemma3", "tiny-qwen3next"],
)
def test_chunks_of_several_blocks_and_a_store_threshold_are_the_simulators_too(
    model: str, tmp_path: Path
) -> None:
    """What `tune` tries of a tier: every step and hit as in the simulator, every answer as without a tier."""
    flags, cases = MODELS[model]
    work, blocks, _, _ = cases[1] if model == "tiny-llama" else cases[0]
    job = {
        "model": model,
        "cores": ["kvtune"],
        "args": [*flags, *SEEDED],
        "cases": [{"workload": work, "blocks": blocks}],
        "logprobs": True,
    }
    without = lockstep(tmp_path, job)["cases"]
    tried: tuple[dict[str, str | int], ...] = (
        {"blocks_per_chunk": 4, "eviction_policy": "arc"},
        {"blocks_per_chunk": 2, "store_threshold": 2, "eviction_policy": "lru"},
    )
    for settings in tried:
        given = engine_flags({"kv_offloading_size": 0.2, **settings})
        both = lockstep(tmp_path, {**job, "args": [*job["args"], *given]})["cases"]
        for case, plain in zip(both, without, strict=True):
            assert case["hits"][0] == case["hits"][1], settings
            assert case["tier_hits"][0] == case["tier_hits"][1], settings
            assert case["copies"][0] == case["copies"][1], settings
            assert case["digests"][0] == case["digests"][1] and len(case["digests"][0]) > 10
            assert furthest(case, plain) < CLOSE, settings
        if model == "tiny-llama":
            assert all(sum(case["tier_hits"][0]) > 0 for case in both), settings


@pytest.mark.parametrize(
    ("model", "blocks", "tier"), [("tiny-llama", 60, TIER), ("tiny-gemma3", 150, [*TIER, *WINDOWS[-2:]])]
)
def test_a_tier_that_loads_something_else_is_seen_in_the_answers(
    model: str, blocks: int, tier: list[str], tmp_path: Path
) -> None:
    """The control: what is loaded decides the tokens' probabilities."""
    job = {
        "model": model,
        "cores": ["stock"],
        "args": [*PLAIN, *SEEDED, *tier],
        "cases": [{"workload": MODELS[model][1][0][0], "blocks": blocks}],
        "logprobs": True,
    }
    (right,) = lockstep(tmp_path, job)["cases"]
    (without,) = lockstep(tmp_path, {**job, "args": [*PLAIN, *SEEDED]})["cases"]
    (zeros,) = lockstep(tmp_path, {**job, "loads_zeros": True})["cases"]
    assert sum(zeros["hits"][0]) == sum(right["hits"][0]) > 0
    assert furthest(right, without) < CLOSE < furthest(zeros, without)


def furthest(case: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between the logarithms of two probabilities of the same token."""
    pairs = zip(case["logprobs"], other["logprobs"], strict=True)
    return max(abs(a - b) for mine, its in pairs for a, b in zip(mine, its, strict=True))


def test_a_profile_says_what_the_tier_hit_and_copied_and_so_does_its_replay(tmp_path: Path) -> None:
    """Its own processes: the front end counts hits by tier, EngineCore's probe the copies. vLLM counts the same."""
    work = MODELS["tiny-llama"][1][0][0]
    flags = (*PLAIN, *TIER, "--num-gpu-blocks-override", "60")
    ran = profiled(tmp_path, "tiny-llama", "-w", work, "--core", "stock", engine=flags)
    counts_as_vllm(ran)
    replayed = simulate(build(work), Setup.of_run(ran.run).replayed(copy=INSTANT))
    mine, its = ran.run.table("requests"), replayed.table("requests")
    assert mine["tier_hit_tokens"].tolist() == its["tier_hit_tokens"].tolist()
    assert mine["hit_tokens"].tolist() == its["hit_tokens"].tolist()
    tier, other = offload(ran.run), offload(replayed)
    assert tier is not None and tier.copies is not None and other is not None and other.copies is not None
    assert tier.tier_hit_tokens == ran.run.header.engine_counters["tier_hits"] > 0
    named = ("stored_bytes", "loaded_bytes", "loads", "stored_chunks", "unread_chunks", "evicted_chunks")
    for name in named:
        assert getattr(tier.copies, name) == getattr(other.copies, name), name
    assert tier.copies.store_s > 0 and tier.copies.wait_s >= tier.copies.longest_wait_s > 0
    assert ran.facts["offload"]["copies"]["loads"] == tier.copies.loads
    assert ran.run.header.probe.disabled == {}
