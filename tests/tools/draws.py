"""Draws models within their families, and compares what the arithmetic plans with what vLLM answers on a forced device.

One process (`python -m tests.tools.draws FOLDER DEVICE`) imports vLLM as on the device and forks for each model.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "intermediate_size": 256,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
}
PLAIN = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "gemma": "GemmaForCausalLM",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "cohere": "CohereForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
WINDOWS = {
    "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
OTHERS = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
}
_WITH_EXPERTS = """
    deepseek_v3 glm4_moe glm4_moe_lite gpt_oss granitemoe hy_v3 kimi_k2 llama4_text minimax_m2 mixtral olmoe qwen2_moe
    qwen3_moe qwen3_next
"""
WITH_EXPERTS = frozenset(_WITH_EXPERTS.split())
DELTA_NETS = ("olmo_hybrid", "qwen3_5_text", "qwen3_next")
FAMILIES = PLAIN | WINDOWS | OTHERS
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def drawn(draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Return a config.json, a family's with sizes, layers, windows and missing fields at random; and vLLM's flags."""
    config = drawn_config(draw)
    ranks = draw.choice([1, 1, 2, 4])
    flags = ["--tensor-parallel-size", str(ranks)] if config["num_attention_heads"] % ranks == 0 else []
    if draw.random() < 0.2:
        flags += ["--kv-cache-dtype", "fp8"]
    if config["model_type"] == "qwen3_5_text":  # as published: inside a multimodal model's config
        (kind,) = config["architectures"]
        config = {"architectures": [kind], "model_type": "qwen3_5", "text_config": config}
    return config, flags


def drawn_config(draw: random.Random) -> dict[str, Any]:
    family = draw.choice(sorted(FAMILIES))
    layers, kv_heads, head_dim = draw.randint(2, 12), draw.choice([1, 2, 4, 8]), draw.choice([64, 128, 256])
    heads = kv_heads * draw.choice([1, 2, 4])
    config = COMMON | {
        "model_type": family,
        "architectures": [FAMILIES[family]],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * draw.choice([64, 128]),
        "head_dim": head_dim,
    }
    if family in WITH_EXPERTS:
        config |= EXPERTS
    if draw.random() < 0.25:
        del config["head_dim"]
    if draw.random() < 0.15:
        del config["num_key_value_heads"]
    if family in ("mistral", "phi3", "qwen2", "mixtral") and draw.random() < 0.6:
        config["sliding_window"] = draw.choice([None, 128, 4096])
    if family == "qwen2":
        config["use_sliding_window"] = draw.random() < 0.3
    if family in WINDOWS:
        config["sliding_window"] = draw.choice([128, 512, 1024])
        kinds = [
            draw.choice(["sliding_attention", "sliding_attention", "full_attention"]) for _ in range(layers)
        ]
        if family == "gpt_oss":
            kinds = [("sliding_attention", "full_attention")[number % 2] for number in range(layers)]
        if draw.random() < 0.8:
            config["layer_types"] = kinds
        elif draw.random() < 0.5:
            config["sliding_window_pattern"] = draw.choice([2, 3, 6])
    return config | _own(family, draw, layers, heads, head_dim)


def _own(family: str, draw: random.Random, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    if family in ("deepseek_v3", "glm4_moe_lite", "kimi_k2"):
        return {
            "kv_lora_rank": draw.choice([256, 512]),
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "q_lora_rank": draw.choice([None, 256]),
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": 1,
        }
    if family in DELTA_NETS:
        every = draw.choice([2, 4])
        kinds = ["linear_attention" if (number + 1) % every else "full_attention" for number in range(layers)]
        listed = {"layer_types": [*kinds[:-1], "full_attention"]}
        counted = {"full_attention_interval": every} if family == "qwen3_next" else listed
        return counted | {
            "linear_num_key_heads": draw.choice([2, 4]),
            "linear_num_value_heads": draw.choice([4, 8]),
            "linear_key_head_dim": 64,
            "linear_value_head_dim": draw.choice([64, 128]),
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.25,
        }
    if family == "granitemoehybrid":
        return {
            "layer_types": ["mamba"] * (layers - 1) + ["attention"],
            "mamba_n_heads": 2 * heads,
            "mamba_d_head": "auto",
            "mamba_d_state": draw.choice([64, 128]),
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "shared_intermediate_size": 128,
            "num_local_experts": 0,
        }
    if family == "nemotron_h":
        return {
            "hybrid_override_pattern": "".join(draw.choice("MM-*") for _ in range(layers - 2)) + "M*",
            "mamba_num_heads": draw.choice([8, 16]),
            "mamba_head_dim": 64,
            "ssm_state_size": draw.choice([64, 128]),
            "n_groups": draw.choice([1, 2, 8]),
            "conv_kernel": 4,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
        } | ({"mamba_ssm_cache_dtype": "bfloat16"} if draw.random() < 0.3 else {})
    if family == "falcon_h1":
        inner = draw.choice([512, 1024])
        return {
            "mamba_d_ssm": inner,
            "mamba_n_heads": inner // 64,
            "mamba_d_head": 64,
            "mamba_d_state": draw.choice([64, 256]),
            "mamba_n_groups": draw.choice([1, 2]),
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        }
    if family == "jamba":
        period = draw.choice([2, 4])
        return {
            "attn_layer_period": period,
            "attn_layer_offset": draw.randrange(min(period, layers)),
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 16,
        }
    if family == "llama4_text":
        return {"attention_chunk_size": draw.choice([1024, 8192]), "interleave_moe_layer_step": 1}
    if family == "gemma4_text":
        return {
            "sliding_window": 512,
            "global_head_dim": 2 * head_dim,
            "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        }
    if family == "lfm2":
        kinds = [draw.choice(["conv", "full_attention"]) for _ in range(layers)]
        return {"layer_types": [*kinds[:-1], "full_attention"], "conv_L_cache": 3, "conv_bias": False} | {
            "block_dim": heads * head_dim,
            "conv_dim": heads * head_dim,
        }
    return {}


Draws = list[tuple[dict[str, Any], list[str]]]
"""Configs, each with flags of vLLM."""


def answers(draws: Draws, device: str, folder: Path) -> list[dict[str, Any]]:
    """Return what vLLM and the arithmetic say of each draw: {"vllm": groups or error, "planned": groups or error}."""
    (folder / "draws.json").write_text(json.dumps(draws))
    command = [sys.executable, "-m", "tests.tools.draws", str(folder), device]
    made = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    if made.returncode:
        raise RuntimeError(made.stderr[-2000:])
    found: list[dict[str, Any]] = json.loads((folder / "answers.json").read_text())
    return found


def _answer_all(folder: Path, name: str) -> None:
    from kvtune.sim.build import run_on
    from kvtune.vllm.platforms import device

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    platform = device(name)
    run_on(platform)
    import vllm.v1.engine.core  # noqa: F401 - imported once

    draws = json.loads((folder / "draws.json").read_text())
    found = []
    for number, (config, flags) in enumerate(draws):
        model = folder / f"model-{number}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        said = [ask(str(model), flags, platform) for ask in (_planned, _forked)]
        found.append(dict(zip(("planned", "vllm"), said, strict=True)))
    (folder / "answers.json").write_text(json.dumps(found))


FLAGS = ["--max-model-len", "8192", "--skip-tokenizer-init"]


def _planned(model: str, flags: list[str], platform: Any) -> Any:
    from kvtune.doctor.planned import read_config
    from kvtune.errors import KvtuneError

    try:
        return _of_groups(read_config(model, FLAGS + flags, platform).groups)
    except KvtuneError as error:
        return error.message


def _forked(model: str, flags: list[str], platform: Any) -> Any:
    """What vLLM says of a model, in a new process: vLLM keeps what it knows of a model's class."""
    inlet, outlet = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(inlet)
        try:
            said = _of_vllm(model, flags, platform)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"[:300]
        with os.fdopen(outlet, "w") as pipe:
            pipe.write(json.dumps(said))
        os._exit(0)
    os.close(outlet)
    with os.fdopen(inlet) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "the process ended"


def _of_vllm(model: str, flags: list[str], platform: Any) -> Any:
    from kvtune.doctor.child import facts_of
    from kvtune.engine.setup import Setup

    return _of_groups(facts_of(Setup(model=model, engine_args=FLAGS + flags, platform=platform)).groups)


def _of_groups(groups: Any) -> list[list[Any]]:
    return sorted([g.kind, g.layers, g.block_tokens, g.used_bytes, g.window] for g in groups)


def verdict(answer: dict[str, Any]) -> str:
    planned, vllm = answer["planned"], answer["vllm"]
    if isinstance(planned, str):
        return "refused by the arithmetic"
    if isinstance(vllm, str):
        return "refused by vLLM"
    return "equal" if planned == vllm else "WRONG"


if __name__ == "__main__":
    _answer_all(Path(sys.argv[1]), sys.argv[2])
