"""What the identity tests of packed blocks share: the loads, engines that each start once, and how far answers differ.

Each layout runs in one engine process (tests/lab/engine/lockstep.py), on seeded weights under which an
answer depends on all of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.lab.engine.real import lockstep

ZIPF = "zipf:prefixes=4,prefix=330,suffix=30,requests=10,concurrency=4,output=8"
DECODE = "decode:requests=5,prompt=150,output=20"
ROUNDS = "rounds:prefixes=1,prefix=1500,suffix=40,output=6,rounds=3"
CHAT = "chat:sessions=2,turns=3,system=64,first=150,user=30,output=20"
# Two prompts that differ in their first block only.
FIRST = {"workload": "first", "spans": [[[1, 0, 160], [2, 0, 240]], [[3, 0, 160], [2, 0, 240]]], "output": 8}

MARKS = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

FLAGS = ["--max-model-len", "2048", "--max-num-seqs", "16"]
CHUNK = ["--max-num-batched-tokens", "512"]
PACKED = {"cores": ["kvtune"], "core_settings": {"packed": True}}

Ran = Callable[[str], dict[str, Any]]


def cases(*pairs: tuple[str, int]) -> list[dict[str, Any]]:
    """Workloads, each with so many blocks (0: all that the engine has)."""
    return [{"workload": work, "blocks": blocks} for work, blocks in pairs]


def started(folders: pytest.TempPathFactory, model: str, layouts: Mapping[str, dict[str, Any]]) -> Ran:
    """By layout: cases by workload, and `state`, the core's. Each engine is started once, when it is asked for."""
    results: dict[str, dict[str, Any]] = {}

    def run(layout: str) -> dict[str, Any]:
        if layout not in results:
            result = lockstep(folders.mktemp(layout), {"model": model, "logprobs": True, **layouts[layout]})
            results[layout] = {"state": result["state"], **{c["workload"]: c for c in result["cases"]}}
        return results[layout]

    return run


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of logprobs while the tokens agree."""
    worst = 0.0
    for a, b, ours, theirs in zip(
        one["answers"], other["answers"], one["logprobs"], other["logprobs"], strict=True
    ):
        alike = next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        if alike:
            worst = max(worst, float(np.abs(np.subtract(ours[:alike], theirs[:alike])).max()))
    return worst


def answers_depend_on_the_first_block(ran: Ran) -> None:
    """Else equal answers would prove nothing."""
    for layout in ("stock", "packed"):
        one, other = ran(layout)["first"]["answers"]
        assert one != other
    chat = [token for answer in ran("stock")[CHAT]["answers"] for token in answer]
    assert len(set(chat)) > 20


def replayed_step_by_step(cases: Mapping[str, Any]) -> None:
    """The simulator decided every step as the engine did."""
    for name, case in cases.items():
        if name in ("state", "first"):
            continue
        real, simulated = case["digests"]
        assert real == simulated and len(real) > 5, name
        assert case["hits"][0] == case["hits"][1], name
