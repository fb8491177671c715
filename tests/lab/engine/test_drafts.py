"""Draft models on the real engine: stock and the core step alike and answer alike, and hit what their replay hits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.engine.real import lockstep
from tests.lab.engine.test_twins import FLAGS
from tests.lab.engine.twins import DRAFTS, drafting

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

LOADS = (
    "rounds:prefixes=2,prefix=1200,suffix=300,output=6,rounds=3",
    "chat:sessions=3,turns=3,system=64,first=500,user=40,output=20",
)
HELPED = {"gptoss"}
"""Targets with windows, which the core keeps: its steps are others than stock's."""
NOT_CACHED = {"deepseek"}
"""vLLM turns prefix caching and chunks off for MLA on a CPU without AMX."""


@pytest.mark.parametrize(("target", "method"), DRAFTS)
def test_drafted_tokens_change_neither_answers_nor_hits(target: str, method: str, tmp_path: Path) -> None:
    model, drafts = drafting(target, method, tmp_path)
    args = [*FLAGS, *drafts, *(["--max-num-batched-tokens", "2400"] if target in NOT_CACHED else [])]
    cases = [{"workload": work, "blocks": 300} for work in LOADS]
    job = {"model": model, "cores": ["stock", "kvtune"], "args": args, "cases": cases, "audit": True}
    results = lockstep(tmp_path, job)["cases"]
    gains = []
    for stock, ours in zip(results[:2], results[2:], strict=True):
        assert (stock["core"], ours["core"]) == ("stock", "kvtune")
        assert stock["answers"] == ours["answers"]
        assert len({tuple(answer) for answer in stock["answers"]}) > 3, "answers depend on the prompt"
        for case in (stock, ours):
            assert case["hits"][0] == case["hits"][1]
        found, kept = sum(stock["hits"][0]), sum(ours["hits"][0])
        assert (found == 0) == (target in NOT_CACHED)
        assert target in HELPED or stock["digests"][0] == ours["digests"][0]
        gains.append(kept - found)
    assert min(gains) >= 0 and (max(gains) > 0) == (target in HELPED)
