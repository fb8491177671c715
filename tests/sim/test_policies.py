"""The orders of eviction in replays: the default beside stock, and the opt-in orders on the loads that they are for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.sim.simulators import Simulators
from tests.bench.loads import OURS, WINDOWS, columns, measure, write

pytestmark = pytest.mark.vllm

LOADS: dict[str, dict[str, Any]] = {
    "sessions": {"kind": "sessions", "sessions": 60, "turns": 5, "new": 2, "think_s": 30.0, "every_s": 12.0},
    "pairs": {"kind": "visits", "prompts": 60, "nodes": 5, "times": 2, "apart": 6, "suffix": 64, "every_s": 4.0},
    "phases": {
        "kind": "phases", "hot": 8, "nodes": 4, "requests": 240, "stays": 60, "skew": 0.0, "suffix": 64,
        "every_s": 2.0,
    },
    # The window of an output covers its prompt, too.
    "repeated": {"kind": "visits", "nodes": 1, "times": 3, "prompts": 107, "apart": 39, "suffix": 183, "every_s": 0.7},
}  # fmt: skip


def row(spec: str, blocks: int, simulators: Simulators, *orders: str) -> dict[str, float]:
    """Percent of what can hit, with stock's default and with these orders."""
    sides = columns(WINDOWS, blocks, orders, 8192)
    return measure(spec, {name: sides[name] for name in ("stock 0", *orders)}, simulators)


@pytest.mark.parametrize("name", LOADS)
def test_the_default_hits_no_less_than_stock(name: str, tmp_path: Path, simulators: Simulators) -> None:
    load = {
        "seed": 0,
        "parts": [{"start_s": 0.0, "output": 137 if name == "repeated" else 16, **LOADS[name]}],
    }
    found = row(write(load, tmp_path), 2600, simulators, OURS)
    assert 20 < found["stock 0"] <= found[OURS]


def test_prefixes_that_return_after_cold_prompts_are_for_two_class(simulators: Simulators) -> None:
    spec = "mix:prefixes=8,prefix=2000,suffix=64,output=16,requests=120,cold=2064,share=0.5"
    found = row(spec, 1500, simulators, OURS, "two_class")
    assert found["two_class"] > found[OURS] + 20 and found[OURS] >= found["stock 0"]


def hit_by_chats(load: str, blocks: int, order: str) -> float:
    """Percent of the prompt tokens of chats."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.chats", load, str(blocks), order],
        capture_output=True,
        text=True,
        check=True,
    )
    counts = json.loads(done.stdout.splitlines()[-1])
    return float(100 * counts["hit"] / counts["asked"])


def test_chats_that_begin_in_a_full_pool_are_for_chat() -> None:
    stock, default, chat = (hit_by_chats("late", 2500, order) for order in ("stock", OURS, "chat"))
    assert stock <= default < 60 and chat > 84


def test_chats_that_are_answered_again_hit_no_less_than_with_stock() -> None:
    stock, default = (hit_by_chats("again", 4000, order) for order in ("stock", OURS))
    assert default >= stock > 85
