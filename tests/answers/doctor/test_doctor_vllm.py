"""The doctor's facts from vLLM itself against the planner, for the tiny models and a real model's config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.answers.doctor import model as doctor_model
from kvtune.answers.doctor.facts import Facts
from kvtune.answers.doctor.model import floor_of
from kvtune.answers.doctor.planned import read_config, with_state_rule
from kvtune.answers.doctor.rules import states_in_float32
from kvtune.data.layout import models
from kvtune.data.platforms import cpu
from kvtune.lab.setup.setup import Setup

# vLLM's imports warn (deprecations of torch): not ours to turn into errors.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

QWEN3_NEXT = Path(__file__).parents[2] / "data" / "layout" / "configs" / "qwen3-next-80b-a3b.json"

QWEN: dict[str, dict[str, Any]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 32,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
"""Dense and expert models of a family that no built-in model has: what their configs say beyond Llama's."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, avx512_bf16: bool) -> dict[str, Facts]:
    """What the doctor's child process finds, here in this process: vLLM is loaded once for all tests.

    All tests of this file run for a CPU without AVX-512 BF16 and for one with it.
    """
    pytest.importorskip("vllm")
    from kvtune.answers.doctor.child import facts_of

    folder = tmp_path_factory.mktemp("facts")
    real = folder / "qwen3-next"
    real.mkdir()
    (real / "config.json").write_text(QWEN3_NEXT.read_text())
    asked: dict[str, tuple[str, list[str]]] = {
        "tiny-llama": ("tiny-llama", []),
        "tiny-opt": ("tiny-opt", []),
        "gpt-oss-20b": ("gpt-oss-20b", []),
        "tiny-gemma3": ("tiny-gemma3", []),
        "tiny-qwen3next": ("tiny-qwen3next", []),
        "asked": ("tiny-qwen3next", ["--mamba-ssm-cache-dtype", "bfloat16"]),
        "real": (str(real), ["--enable-prefix-caching"]),
    }
    for name, fields in QWEN.items():
        (folder / name).mkdir()
        config = {**models.config("llama-3-8b"), "model_type": name, "head_dim": 128, **fields}
        (folder / name / "config.json").write_text(json.dumps(config))
        asked[name] = (str(folder / name), [])
    return {name: facts_of(Setup(model=model, engine_args=args)) for name, (model, args) in asked.items()}


@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-opt", "tiny-gemma3", "gpt-oss-20b", "tiny-qwen3next", *QWEN]
)
def test_what_doctor_answers_by_arithmetic_is_what_vllm_answers(
    facts: dict[str, Facts], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = facts[name]

    def never(*_: object) -> Facts:
        raise AssertionError("vLLM was asked")

    monkeypatch.setattr(doctor_model, "ask_vllm", never)
    answered = doctor_model.examine_model(result.model, [], ask=False)[0]
    assert answered.source == "arithmetic"
    for field in (
        "architecture",
        "device",
        "dtype",
        "kv_cache_dtype",
        "avx512_bf16",
        "state_dtype",
        "caching",
    ):
        assert getattr(answered, field) == getattr(result, field), field
    for field in ("max_model_len", "batched_tokens", "max_requests", "block_tokens", "default_block_tokens"):
        assert getattr(answered, field) == getattr(result, field), field
    for field in ("hash_tokens", "hit_tokens", "retention", "match_unit", "state_mode", "group_layers"):
        assert getattr(answered, field) == getattr(result, field), field
    named = [msgspec.structs.replace(group, specs=[], backend="") for group in result.groups]
    assert sorted(map(repr, answered.groups)) == sorted(map(repr, named))


@pytest.mark.parametrize(("name", "bf16", "float32"), [("tiny-qwen3next", 256, 384), ("real", 640, 1152)])
def test_float32_states_are_named_where_they_raise_the_block(
    facts: dict[str, Facts], name: str, bf16: int, float32: int, avx512_bf16: bool
) -> None:
    completed = with_state_rule(facts[name])
    assert completed.block_tokens == (float32 if avx512_bf16 else bf16)
    assert completed.state_dtype == ("float32" if avx512_bf16 else "bfloat16")
    said = list(states_in_float32(completed))
    assert [f.hint for f in said] == (
        [f"--mamba-ssm-cache-dtype bfloat16 gives blocks of {bf16}"] if avx512_bf16 else []
    )
    # Where vLLM is missing, the planner says the same, and what it took for granted.
    planned = read_config(completed.model, ["--enable-prefix-caching"], cpu())
    assert (planned.block_tokens, planned.state_dtype) == (completed.block_tokens, completed.state_dtype)
    assert ("so recurrent states in float32" in planned.assumed) is avx512_bf16
    assert planned.assumed.startswith("this machine's CPU, with")


def test_the_flag_that_doctor_names_gives_the_smaller_block(facts: dict[str, Facts]) -> None:
    completed = with_state_rule(facts["asked"])
    assert (completed.block_tokens, completed.state_dtype) == (256, "bfloat16")
    assert not list(states_in_float32(completed))


def test_models_without_states_have_no_finding_about_their_type(facts: dict[str, Facts]) -> None:
    for name in ("tiny-llama", "tiny-gemma3"):
        completed = with_state_rule(facts[name])
        assert completed.state_dtype == "" and not list(states_in_float32(completed))


def hits(visits: Any) -> dict[int, list[int]]:
    return {visit.prefix_tokens: visit.hit_tokens for visit in visits}


def test_qwen3_nexts_shortest_hit_is_explained_and_replayed(
    facts: dict[str, Facts], avx512_bf16: bool
) -> None:
    result = facts["real"]
    block = 1152 if avx512_bf16 else 640
    floor = floor_of(result)
    assert floor is not None
    assert floor.tokens == result.block_tokens == block
    assert "must hold one state" in floor.why
    replayed = hits(result.shared_prefix)
    assert replayed[floor.tokens - 1] == [0, 0, 0, 0]
    assert replayed[floor.tokens] == [0, block, block, block]
    assert (floor.first_visit, floor.last_first_visit) == (2, 3)
    assert hits(result.resent)[floor.tokens] == [0, 0]
    assert hits(result.resent)[floor.tokens + 1] == [0, block]


def test_windows_hit_from_the_third_visit(facts: dict[str, Facts]) -> None:
    result = facts["tiny-gemma3"]
    assert result.retention == 0
    assert hits(result.shared_prefix)[4 * result.block_tokens] == [0, 0, 512, 512]
