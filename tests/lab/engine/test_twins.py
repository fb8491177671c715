"""Tiny twins of the models that people run: the real engine and the simulated one in step, with both cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.engine.real import lockstep
from tests.lab.engine.twins import EXACT, TWINS, written

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

FLAGS = [
    "--max-num-batched-tokens",
    "1024",
    "--max-num-seqs",
    "16",
    "--max-model-len",
    "2400",
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "0.1",
    *EXACT,
]
LOADS = (
    "rounds:prefixes=2,prefix=1200,suffix=40,output=4,rounds=3",
    "chat:sessions=3,turns=3,system=64,first=500,user=40,output=20",
)
HELPED = {"gptoss"}
"""Models whose windows end inside a block: the core keeps what stock does not."""


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_replayed_step_by_step(name: str, tmp_path: Path) -> None:
    cases = [{"workload": work, "blocks": 300} for work in LOADS]
    job = {"model": written(name, tmp_path), "cores": ["stock", "kvtune"], "args": FLAGS, "cases": cases}
    results = lockstep(tmp_path, job)["cases"]
    hits: dict[str, int] = {"stock": 0, "kvtune": 0}
    answers: dict[str, list[list[int]]] = {}
    assert len(results) == 4
    for case in results:
        assert case["hits"][0] == case["hits"][1]
        assert case["digests"][0] == case["digests"][1] and len(case["digests"][0]) > 10
        hits[case["core"]] += sum(case["hits"][0])
        assert answers.setdefault(case["workload"], case["answers"]) == case["answers"]
        assert len({tuple(answer) for answer in case["answers"]}) > 3, "answers depend on the prompt"
    assert hits["kvtune"] >= hits["stock"]
    assert (hits["kvtune"] > hits["stock"]) == (name in HELPED)
