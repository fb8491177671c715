"""The built-in models: configs that vLLM runs with random weights, without a download. No vLLM import here.

Tiny models run on any machine. Published shapes are for a GPU or the simulator. `builtin` returns a model's folder,
`engine_defaults` the vLLM flags that it needs on a CPU or on a GPU; flags after `--` override them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Device = Literal["cpu", "gpu"]

FOLDER = Path(__file__).parent / "models"

# "" is a flag without a value. With a fixed cache size a tiny model's pool is the same on every machine, and vLLM
# does not take most of a CPU host's memory.
ANYWHERE = {
    "load-format": "dummy",
    "skip-tokenizer-init": "",
    "kv-cache-memory-bytes": str(1 << 30),
}
ON_CPU = {**ANYWHERE, "dtype": "float32", "enforce-eager": ""}
# As GPU users run their models: bfloat16 (float32 rules FlashAttention out), compiled, with CUDA graphs. vLLM checks
# that its share of the memory is free even if the cache's size is given: a small share works beside other processes.
ON_GPU = {**ANYWHERE, "dtype": "bfloat16", "gpu-memory-utilization": "0.2"}

# On a CPU, vLLM's gated-delta-net kernels take bfloat16 only, and its Mamba-2 crashes where a cached prompt crosses a
# block (core.whole_states works around that): tiny-granite caches only on request.
TINY: dict[str, dict[str, str]] = {
    "tiny-opt": {},
    "tiny-llama": {"max-model-len": "40960"},
    "tiny-gemma3": {"max-model-len": "40960"},
    "tiny-granite": {"max-model-len": "40960", "no-enable-prefix-caching": ""},
    "tiny-qwen3next": {"max-model-len": "40960", "dtype": "bfloat16"},
}

# Not run on a GPU yet. tiny-granite caches there: only the CPU's Mamba-2 crashes. tiny-qwen3next uses Triton: vLLM's
# choice on Hopper, FlashInfer's prefill kernel, is compiled at its first use, or absent.
TINY_ON_GPU: dict[str, dict[str, str]] = {
    **TINY,
    "tiny-granite": {"max-model-len": "40960"},
    "tiny-qwen3next": {
        "max-model-len": "40960",
        "gdn-prefill-backend": "triton",
    },
}

NAMES = tuple(TINY)

# Published shapes, for a GPU or the simulator: a CPU engine would take minutes for a prompt. Quantized as published.
# Their fields are those of the published config.json, as public repositories repeat them (ai-dynamo/aiconfigurator,
# wenhaochai/llm-architecture-lineage). gemma-4-26b agrees with NVIDIA's Megatron-Bridge (8 heads of 256 in windows, 2
# of 512 in the others, 128 experts), nemotron-3-super with Megatron arguments (layer pattern, heads, groups).
# deepseek-v4.1-flash and qwen3.8-flash-next are without their n-gram tables (Engram, PLE): vLLM pins them in host
# memory, and they hold no KV cache. A config.json with them is refused off a GPU; without those layers it is not.
UNLOADED = {"load-format": "dummy", "skip-tokenizer-init": ""}
_SHAPES = """
    opt-125m llama-3-8b llama-3.1-8b llama-3.1-70b llama-4-scout qwen3-8b qwen3-30b-a3b qwen3-30b-a3b-fp8
    qwen3-next-80b qwen3.5-27b qwen3.6-35b-a3b qwen3.8-flash-next gpt-oss-20b gpt-oss-120b gemma-3-4b
    gemma-3-27b gemma-4-12b gemma-4-26b gemma-4-31b deepseek-v3 deepseek-v3.2 deepseek-v4-flash
    deepseek-v4.1-flash kimi-k2 kimi-k3 kimi-linear glm-4.6 glm-5.2 glm-5.3-flash minimax-m2.5 minimax-m3
    mimo-v2-flash mistral-small-3.1 mistral-large-3 nemotron-3-nano nemotron-3-super nemotron-3-ultra
    granite-4.0-h-tiny granite-4.0-h-small lfm2.5-8b-a1b longcat-flash
"""
SHAPES: dict[str, dict[str, str]] = dict.fromkeys(_SHAPES.split(), UNLOADED)

_SIZES = """
    qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b qwen3-0.6b qwen3-1.7b
    qwen3-4b qwen3-14b qwen3-32b qwen3-235b-a22b qwen3-480b-a35b qwen3.5-0.8b qwen3.5-2b qwen3.5-4b qwen3.5-9b
    qwen3.5-122b-a10b qwen3.5-397b-a17b llama-3.2-1b llama-3.2-3b mistral-7b zamba2-2.7b
"""
SIZES = tuple(_SIZES.split())
"""More sizes of these families, for the names in launch lines."""
PUBLISHED = {**SHAPES, **dict.fromkeys(SIZES, UNLOADED)}

UNQUANTIZED = '{"quantization_config": null}'
"""vLLM's CPU build has kernels for few quantized weights. What the cache holds and hits does not depend on them."""


def builtin(name: str) -> Path | None:
    """Return the folder (with config.json) of the built-in model of this name; None for any other name."""
    return FOLDER / name if name in TINY or name in PUBLISHED else None


def engine_defaults(name: str, device: Device = "cpu") -> dict[str, str]:
    """Return the vLLM flags (without dashes) and values that a built-in model needs; {} for any other name."""
    if name not in TINY:
        flags = PUBLISHED.get(name, {})
        quantized = device == "cpu" and bool(flags) and "quantization_config" in config(name)
        return {**flags, "hf-overrides": UNQUANTIZED} if quantized else flags
    return {**ON_GPU, **TINY_ON_GPU[name]} if device == "gpu" else {**ON_CPU, **TINY[name]}


def config(name: str) -> dict[str, object]:
    """Return the parsed config.json of a built-in model. KeyError for any other name."""
    if name not in TINY and name not in PUBLISHED:
        raise KeyError(name)
    parsed: dict[str, object] = msgspec.json.decode((FOLDER / name / "config.json").read_bytes())
    return parsed
