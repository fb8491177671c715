"""Tiny models of the patterns that people run, by the fields of their config.json. Random weights.

Models with states are not among them: tiny-qwen3next and tiny-granite are built in, and stock's CPU path runs neither
Jamba's Mamba-1 nor, in chunks, Nemotron's Mamba-2; Qwen3.5's class wants torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.weights.kvtune_test_weights import LOAD_FORMAT

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "hidden_act": "silu",
}
TWINS: dict[str, dict[str, Any]] = {
    "gptoss": {
        "intermediate_size": 128,
        "head_dim": 64,
        "tie_word_embeddings": False,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "rope_theta": 150000.0,
    },
    "gemma4": {
        "intermediate_size": 256,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "sliding_window": 128,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 512,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "use_bidirectional_attention": None,
    },
    "llama4": {
        "intermediate_size": 256,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "attention_chunk_size": 512,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
        "interleave_moe_layer_step": 1,
        "moe_layers": [],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256,
        "use_qk_norm": True,
        "rope_theta": 500000.0,
        "attn_temperature_tuning": False,
    },
    "lfm2moe": {
        "intermediate_size": 256,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "num_dense_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "rope_theta": 1000000.0,
    },
    "deepseek": {
        "intermediate_size": 256,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "rope_theta": 10000.0,
    },
}


EXACT_ROTARY = ["--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}']
"""vLLM 0.32's CPU kernel takes the heads of a three-dimensional query (LFM2, DeepSeek) for tokens: answers depend on
the batch. With these flags torch rotates them."""
EXACT = ["--dtype", "float32", "--load-format", LOAD_FORMAT, *EXACT_ROTARY]
"""Answers that depend on the whole prompt, and on nothing else."""

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "glm": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
    },
    "gptoss": TWINS["gptoss"],
    "deepseek": TWINS["deepseek"] | {"num_nextn_predict_layers": 1},
}
DENSE: dict[str, Any] = {
    "intermediate_size": 256,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 512,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "block_size": 4,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 500, "target_layer_ids": [1, 2]},
}
DRAFTS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "eagle3"): EAGLE3,
    ("gptoss", "eagle3"): EAGLE3 | {"head_dim": 64},
    ("qwen3", "dflash"): DFLASH,
    ("glm", "mtp"): {},
    ("deepseek", "mtp"): {},
}
"""The draft model's fields, by target and method; MTP's layers are the target's own."""


def written(name: str, folder: Path) -> str:
    """Write the twin's config.json into a folder below `folder`, which is the model's name for vLLM."""
    model = folder / f"tiny-{name}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(COMMON | TWINS[name]))
    return str(model)


def drafting(target: str, method: str, folder: Path) -> tuple[str, list[str]]:
    """Write a target, and its draft model where it has one; the target's name for vLLM, and the flags that draft."""
    model = folder / f"tiny-{target}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(COMMON | DENSE | TARGETS[target]))
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else 3}
    if drafter := DRAFTS[target, method]:
        draft = folder / "draft"
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(COMMON | DENSE | drafter))
        speculative["model"] = str(draft)
        if method == "dflash":  # its buffers are built where vLLM loads weights
            _dflash_weights(draft / "model.safetensors", drafter["num_hidden_layers"])
            speculative["draft_load_config"] = {"load_format": "auto"}
    return str(model), ["--speculative-config", json.dumps(speculative)]


def _dflash_weights(path: Path, layers: int) -> None:
    """Random weights of realistic scale, by vLLM's names."""
    import torch
    from safetensors.torch import save_file

    width, inner, heads, kv_heads, head = 128, 256, 4, 2, 32
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, 2 * width),
        "hidden_norm": (width,),
        "norm": (width,),
    }
    for layer in range(layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (heads * head, width),
            "self_attn.k_proj": (kv_heads * head, width),
            "self_attn.v_proj": (kv_heads * head, width),
            "self_attn.o_proj": (width, heads * head),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    save_file(weights, str(path))
