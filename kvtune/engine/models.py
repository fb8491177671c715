"""The built-in models: configs of ours that vLLM runs with random weights, no download. Tiny ones for any machine, and
published shapes: some are measured by `kvtune evidence` on a GPU, all can be simulated.

Runs anywhere (plain files, no vLLM). `builtin` answers where a model's folder is, `engine_defaults` which of vLLM's
flags it needs to start (a person's own flags go over them).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvtune.engine.weights import LOAD_FORMAT

FOLDER = Path(__file__).parent / "models"

# A flag without a value is "". A fixed cache size makes a tiny model's pool the same on every machine, and keeps
# vLLM from asking for most of the memory of a CPU host.
COMMON = {
    "load-format": "dummy",
    "skip-tokenizer-init": "",
    "dtype": "float32",
    "enforce-eager": "",
    "kv-cache-memory-bytes": str(1 << 30),
}

# vLLM's gated-delta-net kernels for the CPU take bfloat16 only. Its Mamba-2 crashes there where a prompt that is to be
# cached crosses a block (core.whole_states is the way around it): tiny-granite caches only when asked. The two with
# states have weights under which answers depend on the whole prompt: what their layouts are compared by.
OWN: dict[str, dict[str, str]] = {
    "tiny-opt": {},
    "tiny-llama": {"max-model-len": "40960"},
    "tiny-gemma3": {"max-model-len": "40960"},
    "tiny-granite": {"max-model-len": "40960", "load-format": LOAD_FORMAT, "no-enable-prefix-caching": ""},
    "tiny-qwen3next": {"max-model-len": "40960", "load-format": LOAD_FORMAT, "dtype": "bfloat16"},
}

NAMES = tuple(OWN)

# Real shapes, for a GPU or the simulator: a CPU engine would need minutes for a prompt.
SHAPES: dict[str, dict[str, str]] = {
    name: {"load-format": "dummy", "skip-tokenizer-init": ""}
    for name in ("opt-125m", "llama-3-8b", "gemma-3-4b", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b")
}


def builtin(name: str) -> Path | None:
    """The folder (with config.json) of the built-in model of this name, None for any other name."""
    return FOLDER / name if name in OWN or name in SHAPES else None


def engine_defaults(name: str) -> dict[str, str]:
    """vLLM flags (without dashes) and values that the built-in model needs; empty for any other name."""
    return {**COMMON, **OWN[name]} if name in OWN else SHAPES.get(name, {})


def config(name: str) -> dict[str, Any]:
    """The parsed config.json of a built-in model. KeyError for any other name."""
    if name not in OWN and name not in SHAPES:
        raise KeyError(name)
    parsed: dict[str, Any] = msgspec.json.decode((FOLDER / name / "config.json").read_bytes())
    return parsed
