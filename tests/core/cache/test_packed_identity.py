"""Packed blocks on the real engine: the answers are stock's, hits and block ids are the simulator's.

Each layout is one engine in a process of its own (tests/engine/lockstep.py), on seeded weights under which an answer
depends on all of its prompt. Stock without prefix caching is what every other one is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.real import lockstep

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

ZIPF = "zipf:prefixes=4,prefix=330,suffix=30,requests=10,concurrency=4,output=8"
DECODE = "decode:requests=5,prompt=150,output=20"
ROUNDS = "rounds:prefixes=1,prefix=1500,suffix=40,output=6,rounds=3"
CHAT = "chat:sessions=2,turns=3,system=64,first=150,user=30,output=20"
# Two prompts that differ in their first 160 tokens only.
FIRST = {"workload": "first", "spans": [[[1, 0, 160], [2, 0, 240]], [[3, 0, 160], [2, 0, 240]]], "output": 8}

FLAGS = ["--max-model-len", "2048", "--max-num-seqs", "16"]
CHUNK = ["--max-num-batched-tokens", "512"]
ON = [*FLAGS, *CHUNK, "--enable-prefix-caching"]
OFF = [*FLAGS, *CHUNK, "--no-enable-prefix-caching"]


def cases(*pairs: tuple[str, int]) -> list[dict[str, Any]]:
    """Workloads, each with so many blocks (0: all that the engine has)."""
    return [{"workload": work, "blocks": blocks} for work, blocks in pairs]


PACKED = {"cores": ["kvtune"], "core_settings": {"packed": True}}
TWO = {"cores": ["kvtune"], "core_settings": {"packed": True, "states_per_block": 2}}
GRANITE: dict[str, dict[str, Any]] = {
    "stock": {
        "cores": ["stock"],
        "args": OFF,
        "cases": [FIRST, *cases((ZIPF, 0), (DECODE, 0), (ROUNDS, 0), (CHAT, 0))],
    },
    "packed": {
        **PACKED,
        "args": ON,
        "cases": [FIRST, *cases((ZIPF, 40), (DECODE, 40), (ROUNDS, 0), (CHAT, 0))],
    },
    "uncached": {**PACKED, "args": OFF, "cases": cases((ZIPF, 36), (DECODE, 40), (ROUNDS, 0))},
    "two": {**TWO, "args": ON, "cases": cases((ZIPF, 22), (DECODE, 26))},
    "unit": {**PACKED, "args": [*ON, "--prefix-match-unit", "32"], "cases": cases((CHAT, 0), (ZIPF, 40))},
}
QWEN_CASES = [FIRST, *cases((ZIPF, 0), (DECODE, 0), (CHAT, 0))]
FINE = [*FLAGS, "--max-num-batched-tokens", "160"]
QWEN: dict[str, dict[str, Any]] = {
    "stock": {"cores": ["stock"], "args": [*FLAGS, *CHUNK], "cases": QWEN_CASES},
    "packed": {**PACKED, "args": [*FLAGS, *CHUNK], "cases": QWEN_CASES},
    # Prompts cut every 160 tokens, as packed blocks cut them: by stock (which caches nothing), and by packed blocks.
    "control": {"cores": ["stock"], "args": [*FINE, "--no-enable-prefix-caching"], "cases": QWEN_CASES},
    "fine": {**PACKED, "args": FINE, "cases": QWEN_CASES},
}

Ran = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """By model and layout: cases by workload, and `state`, the core's. Each engine is started once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def run(model: str, layout: str) -> dict[str, Any]:
        if (model, layout) not in found:
            job = {"model": model, "logprobs": True, **(GRANITE if model == "tiny-granite" else QWEN)[layout]}
            told = lockstep(tmp_path_factory.mktemp(layout), job)
            found[model, layout] = {"state": told["state"], **{c["workload"]: c for c in told["cases"]}}
        return found[model, layout]

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


@pytest.mark.parametrize("model", ["tiny-granite", "tiny-qwen3next"])
def test_answers_depend_on_the_first_block(ran: Ran, model: str) -> None:
    """Else equal answers would prove nothing."""
    for layout in ("stock", "packed"):
        one, other = ran(model, layout)["first"]["answers"]
        assert one != other
    chat = [token for answer in ran(model, "stock")[CHAT]["answers"] for token in answer]
    assert len(set(chat)) > 20


@pytest.mark.parametrize(
    ("layout", "work"),
    [(layout, c["workload"]) for layout, job in GRANITE.items() if layout != "stock" for c in job["cases"]],
)
def test_fp32_answers_are_stocks(ran: Ran, layout: str, work: str) -> None:
    stock, own = ran("tiny-granite", "stock")[work], ran("tiny-granite", layout)[work]
    assert own["answers"] == stock["answers"]
    assert difference(own, stock) < 1e-4


def test_they_were_compared_under_hits_evictions_and_preemptions(ran: Ran) -> None:
    stock, packed = ran("tiny-granite", "stock"), ran("tiny-granite", "packed")
    assert packed["state"]["parts"]["packed"] is True
    assert (stock[ZIPF]["groups"], packed[ZIPF]["groups"], ran("tiny-granite", "two")[ZIPF]["groups"]) == (
        2,
        9,
        5,
    )
    assert (packed[ZIPF]["block"], ran("tiny-granite", "two")[ZIPF]["block"]) == (160, 320)
    for layout in ("packed", "two"):
        hits = ran("tiny-granite", layout)[ZIPF]["hits"][0]
        assert 320 in hits and 0 in hits[4:]  # some of the later ones lost their prefix
        assert ran("tiny-granite", layout)[ZIPF]["preemptions"] > 0
    assert packed[DECODE]["preemptions"] > 0
    assert packed[ROUNDS]["hits"][0] == [0, 1440, 1440]
    assert sum(ran("tiny-granite", "unit")[CHAT]["hits"][0]) > sum(packed[CHAT]["hits"][0]) > 0
    assert ran("tiny-granite", "uncached")[DECODE]["preemptions"]
    assert sum(ran("tiny-granite", "uncached")[ZIPF]["hits"][0]) == 0


@pytest.mark.parametrize(
    ("model", "layout"),
    [*(("tiny-granite", layout) for layout in GRANITE), *(("tiny-qwen3next", layout) for layout in QWEN)],
)
def test_the_simulator_replays_every_step(ran: Ran, model: str, layout: str) -> None:
    for name, case in ran(model, layout).items():
        if name in ("state", "first"):
            continue
        real, simulated = case["digests"]
        assert real == simulated and len(real) > 5, name
        assert case["hits"][0] == case["hits"][1], name


def test_bf16_differs_from_stock_no_more_than_stock_from_itself(ran: Ran) -> None:
    """Where prompts are cut decides how bf16 rounds: the kernel works on 64 tokens at once, a packed block has 160.

    Requests one after another are cut as the chunk says: cut alike, packed blocks answer as stock does. Cut otherwise,
    stock differs from itself by more than packed blocks ever do from it.
    """
    stock, packed, control, fine = (ran("tiny-qwen3next", name) for name in QWEN)
    assert packed["state"]["parts"]["packed"] and fine["state"]["parts"]["packed"]
    assert (stock[ZIPF]["block"], packed[ZIPF]["block"]) == (256, 160)
    for one, other in ((packed, stock), (fine, control)):
        assert one["first"]["answers"] == other["first"]["answers"]
        assert difference(one["first"], other["first"]) < 1e-3
    works = ("first", ZIPF, DECODE, CHAT)
    rounding = max(difference(control[work], stock[work]) for work in works)
    assert rounding > 0.01
    assert max(difference(packed[work], stock[work]) for work in works) <= rounding
    assert max(difference(fine[work], control[work]) for work in works) <= rounding
    assert sum(packed[ZIPF]["hits"][0]) > 0 and sum(control[ZIPF]["hits"][0]) == 0
