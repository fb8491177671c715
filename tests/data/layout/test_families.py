"""The arithmetic plans a model whose fields it has read, and refuses any other by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.doctor.planned import read_config
from kvtune.base.errors import UsageError
from kvtune.data.layout.config import FAMILIES, family_of, shape_of
from kvtune.data.layout.models import SHAPES, TINY, config
from kvtune.data.layout.plan import GPU, plan_per_layer
from kvtune.data.platforms import Platform

CONFIGS = Path(__file__).parent / "configs"
BASE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "head_dim": 64,
}
MLA = {"num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512} | {
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
}
H100 = Platform("cuda", "NVIDIA H100", 80 << 30, (9, 0))
KNOWN = [
    # family, fields, (full, windows, bytes of a token in all full layers)
    ("llama", BASE, (4, 0, 2048)),
    ("mistral", BASE | {"sliding_window": None}, (4, 0, 2048)),
    ("mistral", BASE | {"sliding_window": 4096}, (0, 4, 0)),
    ("phi3", BASE | {"sliding_window": 262144}, (0, 4, 0)),
    (
        "qwen2",
        BASE | {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 2},
        (4, 0, 2048),
    ),
    (
        "gpt_oss",
        BASE | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2},
        (2, 2, 1024),
    ),
    (
        "gemma3",
        BASE | {"num_hidden_layers": 12, "sliding_window": 512, "sliding_window_pattern": 6},
        (2, 10, 1024),
    ),
    ("deepseek_v3", MLA, (61, 0, 70272)),
    ("kimi_k2", MLA | {"num_attention_heads": 64}, (61, 0, 70272)),
    (
        "gemma3n",
        BASE
        | {
            "num_hidden_layers": 35,
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
        (4, 16, 2048),
    ),
]
REFUSED = [
    ("mistral", BASE, "sliding_window is missing"),
    ("olmo3", BASE | {"sliding_window": 128, "sliding_window_pattern": 2}, "sliding_window_pattern"),
    ("qwen2", BASE | {"head_dim": 128}, "which of them counts"),
    (
        "gpt_oss",
        BASE | {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"] * 2},
        "every other",
    ),
    ("olmo3", BASE | {"sliding_window": 128, "layer_types": ["full_attention"]}, "1 of 4 layers"),
    ("llama4", BASE | {"attention_chunk_size": 8192}, "model_type"),
    ("deepseek_v32", MLA | {"index_topk": 2048}, "model_type"),
    ("deepseek_v3", MLA | {"index_topk": 2048, "index_head_dim": 128}, "index_head_dim, index_topk"),
    ("gemma4", BASE | {"global_head_dim": 512}, "model_type"),
    ("gemma3", BASE | {"sliding_window": 512}, "sliding_window"),
    ("llama", BASE | {"sliding_window": 512}, "sliding_window"),
    ("qwen3", BASE | {"sliding_window": 512, "use_sliding_window": True}, "sliding_window"),
    ("qwen3", {k: v for k, v in BASE.items() if k != "head_dim"}, "head_dim is missing"),
    (
        "qwen2",
        {k: v for k, v in BASE.items() if k != "num_key_value_heads"},
        "num_key_value_heads is missing",
    ),
    ("llama", BASE | {"num_attention_groups": 2}, "num_attention_groups"),
    ("llama", BASE | {"layer_types": ["full_attention", "indexed_attention"] * 2}, "indexed_attention"),
    ("llama", BASE | {"layer_types": ["mamba", "attention"] * 2}, "'mamba'"),
    (
        "llama",
        BASE | {"swa_num_key_value_heads": 8, "v_head_dim": 128},
        "swa_num_key_value_heads, v_head_dim",
    ),
    ("minimax_m2", BASE | {"sparse_attention_config": {"sparse_topk_blocks": 4}}, "sparse_attention_config"),
    ("qwen3", BASE | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme"),
]
KNOWN_MODELS = {
    *TINY,
    "llama-3-8b",
    "opt-125m",
    "gemma-3-27b",
    "gpt-oss-20b",
    "qwen3-next-80b",
    "deepseek-v3",
    "kimi-k2",
}
NEWER = {
    "attention_chunk_size": 4096,
    "compress_ratios": [0, 4],
    "cross_attention_layers": [3],
    "global_head_dim": 512,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "linear_attn_config": {"head_dim": 128},
    "num_global_key_value_heads": 4,
    "num_kv_shared_heads": 2,
    "sparse_attention_config": {"sparse_index_dim": 128},
    "swa_head_dim": 192,
    "window_attn_skip_layers": [1],
}


def built(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": family, **fields}


@pytest.mark.parametrize(("family", "fields", "wanted"), KNOWN)
def test_a_known_family_is_planned(family: str, fields: dict[str, Any], wanted: tuple[int, int, int]) -> None:
    shape = shape_of(built(family, fields))
    assert (shape.attention_layers, shape.window_layers, shape.token_bytes) == wanted


@pytest.mark.parametrize(("family", "fields", "named"), REFUSED)
def test_what_is_not_known_is_refused_by_name(family: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        shape_of(built(family, fields))
    assert named in refused.value.message and refused.value.hint


@pytest.mark.parametrize("field", NEWER)
def test_no_family_plans_beside_a_field_that_it_does_not_read(field: str) -> None:
    """Whatever a newer config.json adds to a family that is known."""
    configs = [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]
    configs += [config(name) for name in (*TINY, *SHAPES) if family_of(config(name)) in FAMILIES]
    planned = 0
    for old in configs:
        text = old.get("text_config") or old
        if field in text:
            continue
        planned += 1
        with pytest.raises(UsageError, match=field):
            shape_of({**old, "text_config": text | {field: NEWER[field]}}, "m")
    assert planned >= 20


@pytest.mark.parametrize("name", [*TINY, *SHAPES])
def test_a_built_in_model_is_planned_or_refused_by_name(name: str) -> None:
    try:
        assert plan_per_layer(shape_of(config(name), name), GPU).block_tokens
    except UsageError as error:
        assert name not in KNOWN_MODELS and ("model_type" in error.message or "field" in error.message)


@pytest.mark.parametrize(
    ("platform", "flags", "block"),
    [
        (H100, [], 16),
        (H100, ["--kv-cache-dtype", "fp8"], 0),
        (Platform("cuda", "NVIDIA B200", 180 << 30, (10, 0)), [], 0),
        (Platform("cuda", "a GPU"), [], 0),
        (Platform("cuda", "a GPU"), ["--block-size", "64"], 64),
    ],
)
def test_the_block_of_latents_is_known_on_an_h100_only(
    tmp_path: Path, platform: Platform, flags: list[str], block: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(built("deepseek_v3", MLA) | {"architectures": ["X"]}))
    if block:
        facts = read_config(str(tmp_path), flags, platform)
        assert facts.block_tokens == block and facts.groups[0].used_bytes == block * 576 * 2
    else:
        with pytest.raises(UsageError, match="the block of its attention"):
            read_config(str(tmp_path), flags, platform)


@pytest.mark.parametrize(
    ("flags", "page"), [([], 2), (["--tensor-parallel-size", "2"], 1), (["--kv-cache-dtype", "fp8"], 1)]
)
def test_ranks_and_the_caches_type_count(tmp_path: Path, flags: list[str], page: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(built("llama", BASE)))
    assert read_config(str(tmp_path), flags, H100).groups[0].page_bytes == page * 16 * 256


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "zamba2"])
def test_what_may_miss_is_transformers_own_default(family: str) -> None:
    """Without the field, transformers' class says what the arithmetic says. Zamba2's `head_dim` counts other inputs."""
    transformers = pytest.importorskip("transformers")
    inner = ("gemma3", "gemma3n", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
    kind = f"{family}_text" if family in inner else {"kimi_k2": "deepseek_v3"}.get(family, family)
    known = FAMILIES[family]
    made = transformers.AutoConfig.for_model(
        kind, hidden_size=1536, num_attention_heads=24, num_hidden_layers=6
    )
    given = {"hidden_size": 1536, "num_attention_heads": 24, "num_hidden_layers": 6}
    if known.heads_may_miss and not known.latent:
        assert (getattr(made, "num_key_value_heads", None) or 24) == 24
        if known.states is None:
            assert shape_of(built(family, given | {"head_dim": 64})).kv_heads == 24
    if known.size != "given" and not known.latent:
        given |= {"sliding_window": None} if known.window_given else {}
        assert (getattr(made, "head_dim", None) or 64) == 64
        if known.states is None:
            assert shape_of(built(family, given | {"num_key_value_heads": 8})).head_dim == 64
