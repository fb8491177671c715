"""The orders of eviction in replays: the default beside stock, and the opt-in orders on the loads that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from bench.loads import OURS, WINDOWS, columns, measure, write
from kvtune.lab.sim.simulators import Simulators
from tests.choice import first_of

pytestmark = pytest.mark.vllm

LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "sessions": (
        1600, {"kind": "sessions", "sessions": 40, "turns": 5, "new": 2, "think_s": 30.0, "every_s": 12.0},
    ),
    "pairs": (
        1600, {"kind": "visits", "prompts": 40, "nodes": 5, "times": 2, "apart": 4, "suffix": 64, "every_s": 4.0},
    ),
    "phases": (
        2000, {"kind": "phases", "hot": 8, "nodes": 4, "requests": 120, "stays": 40, "skew": 0.0, "suffix": 64,
               "every_s": 2.0},
    ),
    # The window of an output covers its prompt, too.
    "repeated": (
        1500, {"kind": "visits", "nodes": 1, "times": 3, "prompts": 50, "apart": 20, "suffix": 183, "output": 137,
               "every_s": 0.7},
    ),
}  # fmt: skip
"""Blocks of the pool, and the load."""


def row(spec: str, blocks: int, simulators: Simulators, *orders: str) -> dict[str, float]:
    """Percent of what can hit, with stock's default and with these orders."""
    sides = columns(WINDOWS, blocks, orders, 8192)
    return measure(spec, {name: sides[name] for name in ("stock 0", *orders)}, simulators)


@pytest.mark.parametrize("name", first_of(list(LOADS)))
def test_the_default_hits_no_less_than_stock(name: str, tmp_path: Path, simulators: Simulators) -> None:
    blocks, part = LOADS[name]
    load = {"seed": 0, "parts": [{"start_s": 0.0, "output": 16, **part}]}
    found = row(write(load, tmp_path), blocks, simulators, OURS)
    assert 20 < found["stock 0"] <= found[OURS]


@pytest.mark.full
def test_prefixes_that_return_after_cold_prompts_are_for_two_class(simulators: Simulators) -> None:
    spec = "mix:prefixes=8,prefix=2000,suffix=64,output=16,requests=120,cold=2064,share=0.5"
    found = row(spec, 1500, simulators, OURS, "two_class")
    assert found["two_class"] > found[OURS] + 20 and found[OURS] >= found["stock 0"]


@pytest.mark.full
def test_chats_that_begin_in_a_full_pool_are_for_chat(simulators: Simulators) -> None:
    spec = "chat:sessions=12,turns=5,system=256,first=500,user=100,output=600,concurrency=2,before=24"
    found = row(spec, 2500, simulators, OURS, "chat")
    assert found["stock 0"] <= found[OURS] < found["chat"] - 30
