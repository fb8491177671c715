"""The built-in tiny models: configs of ours that vLLM runs with random weights, no download.

Runs anywhere (plain files, no vLLM). `builtin` answers where a model's folder is, `defaults` which engine arguments it
needs to start (a person's own arguments go over them).
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

FOLDER = Path(__file__).parent / "models"

COMMON: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float32",
}

# What differs from COMMON. vLLM's gated-delta-net kernels for the CPU take bfloat16 only; the state-space part of a
# hybrid caches prefixes only in `align` mode.
OWN: dict[str, dict[str, Any]] = {
    "tiny-opt": {},
    "tiny-llama": {"max_model_len": 40960},
    "tiny-gemma3": {"max_model_len": 40960},
    "tiny-qwen3next": {"dtype": "bfloat16", "max_model_len": 40960},
}

NAMES = tuple(OWN)


def builtin(name: str) -> Path | None:
    """The folder (with config.json) of the built-in model of this name, None for any other name."""
    return FOLDER / name if name in OWN else None


def defaults(name: str) -> MappingProxyType[str, Any]:
    """Engine arguments (vLLM's names) that the built-in model needs; empty for any other name."""
    return MappingProxyType({**COMMON, **OWN[name]} if name in OWN else {})


def config(name: str) -> dict[str, Any]:
    """The parsed config.json of a built-in model. KeyError for any other name."""
    if name not in OWN:
        raise KeyError(name)
    parsed: dict[str, Any] = msgspec.json.decode((FOLDER / name / "config.json").read_bytes())
    return parsed
