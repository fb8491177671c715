"""The real engine and the simulated one, step by step: same blocks in every step, same hits of every request.

One engine start for all of tiny-gemma3: some 20 s, and half as long to compute the workloads with both cores.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.real import lockstep

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


NUMBERS = [pytest.param(n, id=case[0].split(":")[0]) for n, case in enumerate(CASES[:1])]
NUMBERS += [
    pytest.param(n, id=case[0].split(":")[0], marks=pytest.mark.full) for n, case in enumerate(CASES[1:], 1)
]


@pytest.fixture(scope="module")
def compared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Engine and replay, side by side, of the cases that are to be tested."""
    folder = tmp_path_factory.mktemp("lockstep")
    here = [item for item in request.session.items if item.path == request.path]
    numbers = {item.callspec.params["number"] for item in here if hasattr(item, "callspec")}
    cases = [{"workload": CASES[n][0], "blocks": CASES[n][1]} for n in sorted(numbers) or [0]]
    job = {"model": "tiny-gemma3", "cores": ["stock", "kvtune"], "args": FLAGS, "cases": cases}
    results: list[dict[str, Any]] = lockstep(folder, job)["cases"]
    return results


@pytest.mark.parametrize("core", ["stock", "kvtune"])
@pytest.mark.parametrize("number", NUMBERS)
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
    for core, work in answers:
        ours = answers["kvtune", work]
        assert ours == answers[core, work]
        assert len({tuple(answer) for answer in ours}) > 1
