"""Configs with fields drawn at random within their family: arithmetic says what vLLM says for an H100, or refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtune.engine import models
from kvtune.sim.simulators import Simulators
from kvtune.workload.spec import build
from tests.tools.models import answer, arithmetic, set_up

pytestmark = [pytest.mark.vllm, pytest.mark.full]

DRAWS = 25
Draw = Callable[[random.Random], dict[str, Any]]


def heads(draw: random.Random) -> dict[str, Any]:
    kv = draw.choice([1, 2, 4, 8])
    of = kv * draw.choice([1, 2, 4])
    return {
        "num_hidden_layers": draw.randint(2, 12),
        "num_attention_heads": of,
        "num_key_value_heads": kv,
        "head_dim": draw.choice([64, 80, 96, 128]),
        "hidden_size": of * draw.choice([64, 128]),
        "intermediate_size": 512,
        "vocab_size": 1024,
    }


KINDS = ("sliding_attention", "full_attention")


def windows(draw: random.Random) -> dict[str, Any]:
    fields = heads(draw)
    types = [draw.choice(KINDS) for _ in range(fields["num_hidden_layers"] - 1)] + ["full_attention"]
    return {**fields, "layer_types": types, "sliding_window": draw.choice([128, 512, 1024, 4096])}


def alternating(draw: random.Random) -> dict[str, Any]:
    """vLLM's class alternates whatever `layer_types` says, and its kernels with sinks pad other sizes of heads."""
    fields = windows(draw)
    return {
        **fields,
        "head_dim": 64,
        "layer_types": [KINDS[n % 2] for n in range(fields["num_hidden_layers"])],
    }


def experts(draw: random.Random) -> dict[str, Any]:
    return {**heads(draw), "num_experts": 8, "moe_intermediate_size": 128}


def latent(draw: random.Random) -> dict[str, Any]:
    fields = heads(draw)
    fields.pop("head_dim")
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    return {
        **fields,
        "hidden_size": 1024,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "kv_lora_rank": 512,  # the only sizes that kernels take
        "qk_rope_head_dim": 64,
        "quantization_config": None,
    }


def states(draw: random.Random) -> dict[str, Any]:
    layers, state_heads = draw.randint(3, 12), draw.choice([16, 32, 64])
    return {
        "num_hidden_layers": layers,
        "layer_types": ["mamba"] * (layers - 2) + ["attention"] + ["mamba"],
        "num_attention_heads": 8,
        "num_key_value_heads": draw.choice([1, 2, 4]),
        "mamba_d_state": draw.choice([64, 128]),
        "mamba_n_heads": state_heads,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "hidden_size": state_heads * 32,
        "vocab_size": 1024,
    }


def linear(draw: random.Random) -> dict[str, Any]:
    layers = 4 * draw.randint(1, 3)
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": draw.choice([1, 2]),
        "num_attention_heads": draw.choice([4, 8]),
        "head_dim": draw.choice([128, 256]),
        "hidden_size": 512,
        "vocab_size": 1024,
        "linear_num_key_heads": draw.choice([4, 8, 16]),
        "linear_num_value_heads": draw.choice([16, 32]),
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }


FAMILIES: dict[str, tuple[str, Draw]] = {
    "llama": ("llama-3.1-8b", heads),
    "qwen3": ("qwen3-8b", heads),
    "qwen3_moe": ("qwen3-30b-a3b", experts),
    "gpt_oss": ("gpt-oss-20b", alternating),
    "gemma3": ("gemma-3-4b", windows),
    "deepseek_v3": ("deepseek-v3", latent),
    "granite_hybrid": ("granite-4.0-h-tiny", states),
    "qwen3_next": ("qwen3-next-80b", linear),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_arithmetic_is_vllms_answer_or_a_refusal(family: str, simulators: Simulators, tmp_path: Path) -> None:
    shape, drawn = FAMILIES[family]
    draw = random.Random(family)
    names = []
    for number in range(DRAWS):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = models.config(shape)
        inner = config.get("text_config")
        fields = drawn(draw)
        changed = (
            {**config, "text_config": {**inner, **fields}}
            if isinstance(inner, dict)
            else {**config, **fields}
        )
        config = {name: value for name, value in changed.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        names.append(str(folder))
    work = build("rounds:prefixes=1,prefix=64,suffix=8,output=1,rounds=3")
    said, built = {}, 0
    for number, run in simulators.map(work, [set_up(name, "stock") for name in names]):
        vllm = answer(run, run)
        built += "refused" not in vllm
        said[number] = arithmetic(names[number], vllm)
        assert said[number] != "differs", ((Path(names[number]) / "config.json").read_text(), vllm)
    assert len(said) == DRAWS and built >= DRAWS // 2
