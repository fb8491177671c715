"""The doctor's facts from vLLM itself against the planner, for the tiny models and a real model's config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.doctor.facts import Facts
from kvtune.doctor.model import ModelReport, floor_of
from kvtune.engine import models
from kvtune.layout.config import shape_of
from kvtune.layout.plan import CPU, plan_per_layer

# vLLM's imports warn (deprecations of torch): not ours to turn into errors.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

QWEN3_NEXT = Path(__file__).parents[1] / "layout" / "configs" / "qwen3-next-80b-a3b.json"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """What the doctor's child process finds, here in this process: vLLM is loaded once for all tests."""
    pytest.importorskip("vllm")
    from kvtune.doctor.child import facts_of

    folder = tmp_path_factory.mktemp("facts")
    real = folder / "qwen3-next"
    real.mkdir()
    (real / "config.json").write_text(QWEN3_NEXT.read_text())
    asked: dict[str, tuple[str, list[str]]] = {
        "tiny-llama": ("tiny-llama", []),
        "tiny-gemma3": ("tiny-gemma3", []),
        "tiny-qwen3next": ("tiny-qwen3next", []),
        "raised": ("tiny-qwen3next", ["--block-size", "64"]),
        "real": (str(real), ["--enable-prefix-caching"]),
    }
    return {
        name: facts_of({"model": model, "args": args, "given": {}}) for name, (model, args) in asked.items()
    }


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3", "tiny-qwen3next"])
def test_the_planner_agrees_with_vllm(facts: dict[str, Facts], name: str) -> None:
    found = facts[name]
    dtype = "bfloat16" if name == "tiny-qwen3next" else "float32"
    plan = plan_per_layer(shape_of(models.config(name), name, dtype=dtype), CPU)
    assert plan.block_tokens == found.block_tokens
    assert plan.groups == len(found.groups)
    assert plan.block_bytes == found.block_bytes
    assert plan.shape.token_bytes == ModelReport(found, None).token_bytes
    assert plan.shape.state_bytes * plan.shape.state_layers == ModelReport(found, None).state_bytes


def test_a_request_only_raises_the_block(facts: dict[str, Facts]) -> None:
    shape = shape_of(models.config("tiny-qwen3next"), dtype="bfloat16")
    assert facts["raised"].block_tokens == plan_per_layer(shape, CPU, 64).block_tokens > 64


def hits(visits: Any) -> dict[int, list[int]]:
    return {visit.prefix_tokens: visit.hit_tokens for visit in visits}


def test_qwen3_next_says_which_prefix_can_hit_and_why(facts: dict[str, Facts]) -> None:
    found = facts["real"]
    floor = floor_of(found)
    assert floor is not None
    shape = shape_of(json.loads(QWEN3_NEXT.read_text()))
    assert floor.tokens == found.block_tokens == plan_per_layer(shape, CPU).block_tokens == 640
    assert "must hold one state" in floor.why
    replayed = hits(found.shared_prefix)
    assert replayed[floor.tokens - 1] == [0, 0, 0, 0]
    assert replayed[floor.tokens] == [0, 640, 640, 640]
    assert (floor.first_visit, floor.last_first_visit) == (2, 3)
    assert hits(found.resent)[floor.tokens] == [0, 0]
    assert hits(found.resent)[floor.tokens + 1] == [0, 640]


def test_windows_hit_from_the_third_visit(facts: dict[str, Facts]) -> None:
    found = facts["tiny-gemma3"]
    assert found.retention == 0
    assert hits(found.shared_prefix)[4 * found.block_tokens] == [0, 0, 512, 512]
