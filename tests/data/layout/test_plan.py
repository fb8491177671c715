"""The planner's arithmetic: known sizes of real models, and what must hold for any shape."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.base.errors import UsageError
from kvtune.data.layout import plan
from kvtune.data.layout.config import shape_of
from kvtune.data.layout.plan import (
    CPU,
    GPU,
    Backend,
    ModelShape,
    StateTensor,
    least_block_tokens,
    legal_aggregate,
    legal_per_layer,
    match_units,
    plan_aggregate,
    plan_per_layer,
    sweep_candidates,
)

CONFIGS = Path(__file__).parent / "configs"

# Effective block on a GPU today, groups (attention + states), smallest aggregate block.
REAL_MODELS = {
    "bamba-9b": (528, 11, 176),
    "falcon-h1-0.5b": (800, 2, 32),
    "falcon-h1-34b": (1040, 2, 16),
    "granite-4.0-h-micro": (528, 10, 144),
    "granite-4.0-h-small": (528, 10, 144),
    "granite-4.0-h-tiny": (400, 10, 112),
    "jamba-1.5-mini": (80, 8, 32),
    "nemotron-3-nano-30b-a3b": (2096, 5, 352),
    "nemotron-h-56b": (4128, 7, 416),
    "nemotron-h-8b": (1040, 7, 272),
    "qwen3-next-80b-a3b": (544, 4, 48),
    "qwen3.5-27b": (784, 4, 64),
    "zamba2-2.7b": (48, 7, 16),
}


def config_of(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


def shape_named(name: str, **options: Any) -> ModelShape:
    return shape_of(config_of(name), name, **options)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models(name: str) -> None:
    block, groups, aggregate = REAL_MODELS[name]
    shape = shape_named(name)
    plan = plan_per_layer(shape, GPU)
    assert (plan.block_tokens, plan.groups) == (block, groups)
    assert legal_aggregate(shape, GPU, block)[0].block_tokens == aggregate


@pytest.mark.parametrize(
    ("model", "capability", "stock", "packed"),
    [
        ("qwen3-next-80b-a3b", 9, 576, 64),
        ("qwen3-next-80b-a3b", 10, 576, 64),
        ("qwen3-next-80b-a3b", 8, 544, 48),
        ("qwen3.5-27b", 9, 832, 64),
        ("granite-4.0-h-small", 9, 528, 144),
    ],
)
def test_delta_nets_blocks_end_where_flashinfer_keeps_states(
    model: str, capability: int, stock: int, packed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_named(model)
    monkeypatch.setattr(plan, "keeps_states_in_chunks", lambda: True)
    backend = plan.gpu_backend("FLASH_ATTN", capability)
    assert plan_per_layer(shape, backend).block_tokens == stock
    assert legal_aggregate(shape, backend, stock)[0].block_tokens == packed
    half = replace(shape, delta_heads=shape.delta_heads and 64)
    assert backend.state_step(half) == (64 if model.startswith("qwen") and capability == 9 else 1)
    monkeypatch.setattr(plan, "keeps_states_in_chunks", lambda: False)  # vLLM 0.32
    assert plan_per_layer(shape, plan.gpu_backend("", 9)).block_tokens == REAL_MODELS[model][0]


def test_qwen3_next_in_numbers() -> None:
    shape = shape_named("qwen3-next-80b-a3b")
    assert shape.state_bytes == 3 * 8192 * 2 + 32 * 128 * 128 * 2
    assert shape.layer_token_bytes == 2 * 2 * 256 * 2
    assert shape.token_bytes == 12 * 2048
    plan = plan_per_layer(shape, GPU)
    assert plan.block_bytes == 12 * 544 * 2048
    assert plan.request_blocks(1000) == 2 + 3 * 2


def test_ranks_split_heads_but_may_replicate_state_groups() -> None:
    one, two = (shape_named("granite-4.0-h-small", tensor_parallel=ranks) for ranks in (1, 2))
    assert two.kv_heads * 2 == one.kv_heads
    # One state group is replicated on both ranks, so a rank's convolution is more than half.
    assert two.states[0].size_bytes * 2 == one.states[0].size_bytes + 2 * 128 * 3 * 2
    assert two.states[1].size_bytes * 2 == one.states[1].size_bytes


def test_fp8_keys_double_the_block() -> None:
    shape = shape_named("qwen3-next-80b-a3b", kv_cache_dtype="fp8")
    assert plan_per_layer(shape, GPU).block_tokens == 16 * ceil(shape.state_bytes / (16 * 1024)) == 1072


def test_blocks_are_the_least_legal_multiple_of_the_given_size() -> None:
    shape = shape_named("qwen3-next-80b-a3b")  # floor: 536 tokens
    answers = {
        asked: plan_per_layer(shape, GPU, asked).block_tokens for asked in (16, 32, 64, 512, 544, 560, 1024)
    }
    assert answers == {16: 544, 32: 544, 64: 576, 512: 1024, 544: 544, 560: 560, 1024: 1024}


def test_full_attention_takes_any_size_that_the_kernel_supports() -> None:
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    shape = shape_of({**llama, "hidden_size": 512, "dtype": "float32"})
    assert (shape.attention_layers, shape.state_layers, shape.layer_token_bytes) == (4, 0, 2 * 2 * 64 * 4)
    assert plan_per_layer(shape, GPU).block_tokens == 16
    assert plan_per_layer(shape, CPU, 96).block_tokens == 96
    with pytest.raises(UsageError, match="block size 16 is not a multiple of 32: no cpu kernel"):
        plan_per_layer(shape, CPU, 16)
    assert sweep_candidates(shape, GPU, 4096) == [16, 32, 64, 128, 256, 512]


def test_window_layers_are_groups_of_their_own() -> None:
    gemma = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "hidden_size": 256,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    }
    shape = shape_of(gemma)
    assert (shape.attention_layers, shape.window_layers, shape.window) == (2, 10, 512)
    plan = plan_per_layer(shape, GPU)
    assert (plan.attention_groups, plan.window_groups) == (1, 5)
    assert plan.request_blocks(10_000) == 625 + 5 * 33


def test_sizes_that_can_never_hit_are_no_candidates() -> None:
    shape = shape_named("nemotron-h-8b")
    assert sweep_candidates(shape, GPU, 8192) == [1040, 2080, 4160]
    assert sweep_candidates(shape, GPU, 1500) == [1040]
    assert sweep_candidates(shape, GPU, 512) == []


def test_match_units_divide_the_block() -> None:
    assert match_units(544, 16) == [16, 32, 272]
    assert match_units(16, 16) == []


def test_errors_name_the_field() -> None:
    config = config_of("qwen3-next-80b-a3b")
    del config["linear_num_key_heads"]
    with pytest.raises(UsageError, match=r"my\.json: field linear_num_key_heads is missing"):
        shape_of(config, "my.json")
    with pytest.raises(UsageError, match="newer: field model_type: kvtune has no arithmetic for 'newer'"):
        shape_of({"model_type": "newer", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]})
    with pytest.raises(UsageError, match="data type 'int3'"):
        shape_of(config_of("qwen3-next-80b-a3b"), kv_cache_dtype="int3")
    with pytest.raises(UsageError, match="do not hold one state"):
        plan_aggregate(shape_named("qwen3-next-80b-a3b"), GPU, 16)
    with pytest.raises(UsageError, match="not positive"):
        plan_per_layer(shape_named("qwen3-next-80b-a3b"), GPU, 0)


shapes = st.builds(
    ModelShape,
    name=st.just("any"),
    attention_layers=st.integers(1, 80),
    kv_heads=st.integers(1, 32),
    head_dim=st.sampled_from([32, 64, 80, 128, 160, 256]),
    kv_element_bytes=st.sampled_from([1, 2, 4]),
    state_layers=st.integers(1, 120),
    states=st.tuples(
        st.builds(
            StateTensor, st.just("conv"), st.tuples(st.integers(1, 4), st.integers(1, 20_000)), st.just(2)
        ),
        st.builds(
            StateTensor,
            st.just("ssm"),
            st.tuples(st.integers(1, 256), st.integers(1, 128), st.integers(1, 256)),
            st.sampled_from([2, 4]),
        ),
    ),
)
backends = st.sampled_from([GPU, CPU, Backend("flashinfer", 64, 64)])


@given(shapes, backends, st.integers(1, 64))
def test_a_page_holds_a_state_and_the_next_smaller_does_not(
    shape: ModelShape, backend: Backend, times: int
) -> None:
    asked = times * backend.alignment
    plan = plan_per_layer(shape, backend, asked)
    page = plan.block_tokens * shape.layer_token_bytes
    assert plan.block_tokens % backend.alignment == 0
    assert page >= shape.state_bytes
    assert (plan.block_tokens - asked) * shape.layer_token_bytes < shape.state_bytes
    assert plan.block_tokens >= least_block_tokens(shape, backend.alignment)
    # Asking for what came out changes nothing.
    assert plan_per_layer(shape, backend, plan.block_tokens).block_tokens == plan.block_tokens


@given(shapes, backends)
def test_every_layer_is_in_a_group(shape: ModelShape, backend: Backend) -> None:
    plan = plan_per_layer(shape, backend)
    assert plan.groups * plan.group_layers >= shape.attention_layers + shape.state_layers
    for finer in legal_aggregate(shape, backend, plan.block_tokens):
        assert 0 <= finer.states_per_block * finer.state_groups - shape.state_layers < finer.state_groups
        assert finer.states_per_block * shape.state_bytes <= finer.block_bytes


@given(shapes, backends)
def test_aggregate_blocks_are_never_coarser(shape: ModelShape, backend: Backend) -> None:
    today = plan_per_layer(shape, backend, backend.alignment)
    assert legal_aggregate(shape, backend, today.block_tokens)[0].block_tokens <= today.block_tokens


@given(shapes, st.integers(1, 30))
def test_legal_sizes_are_distinct_and_sorted(shape: ModelShape, blocks: int) -> None:
    limit = blocks * least_block_tokens(shape, 64) // 8
    sizes = [plan.block_tokens for plan in legal_per_layer(shape, Backend("any", 64, 64), min(limit, 20_000))]
    assert sizes == sorted(set(sizes))
    assert all(size <= limit for size in sizes)
