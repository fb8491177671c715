"""Admission by cached prefix on the real engine: steps are its replay's, answers stock's. Two engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.real import lockstep

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

FLAGS = ["--block-size", "32", "--max-num-batched-tokens", "512", "--max-num-seqs", "4", "--max-model-len"]
FLAGS += ["1000", "--load-format", "kvtune-seeded"]
# More requests at once than the engine runs; in the second, first come first served keeps losing what it would hit.
CASES = [
    ("zipf:prefixes=6,prefix=500,suffix=40,requests=24,concurrency=24,output=6", 90),
    ("chat:sessions=8,turns=2,system=64,first=300,user=40,output=20,concurrency=8", 60),
]


def compared(folder: Path, core: str, **more: Any) -> dict[str, Any]:
    folder.mkdir()
    cases = [{"workload": work, "blocks": blocks} for work, blocks in CASES]
    job = {"model": "tiny-llama", "cores": [core], "args": FLAGS, "cases": cases, **more}
    return lockstep(folder, job)


def test_every_step_is_the_replays_and_the_answers_are_stocks(tmp_path: Path) -> None:
    stock = compared(tmp_path / "stock", "stock")
    ours = compared(tmp_path / "ours", "kvtune", core_settings={"admission": "longest_prefix"})
    assert ours["state"]["parts"]["admission"] is True
    for case in (*stock["cases"], *ours["cases"]):
        real, simulated = case["digests"]
        assert simulated == real and len(real) > 10
        assert case["hits"][1] == case["hits"][0]
    for theirs, mine in zip(stock["cases"], ours["cases"], strict=True):
        assert mine["answers"] == theirs["answers"]
    hits = [[sum(case["hits"][0]) for case in one["cases"]] for one in (stock, ours)]
    assert hits[1][0] >= hits[0][0] and hits[1][1] > 2 * hits[0][1], hits
