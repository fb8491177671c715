"""Reads and checks the fields of a model's config.json: the file may be damaged.

A field that is missing or has a wrong type is a UsageError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvtune.base.errors import UsageError

Config = dict[str, Any]

MOST = 1 << 31
"""The largest accepted number of heads, elements or tokens."""
MOST_LAYERS = 1_000


def text_config(config: Config) -> Config:
    """Return the part of the config that describes the language model, or the whole config if it has no such part."""
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise UsageError("field text_config is no JSON object", "give the model's whole config.json")
    return text


def text_of(config: Mapping[str, Any], name: str) -> str:
    """Return a field that is text; empty if it is missing."""
    value = config.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise _wrong(name, value, "text")


LAYOUT = re.compile(
    r"window|sliding|swa_|chunk|lora_rank|rope_head|nope_head|index|sparse|compress|latent|kda|delta|linear_|mamba|ssm"
    r"|conv|state|layer_types|block_type|hybrid|pattern|attn_layer|attention_groups|kv_shared|share|cla_|yoco|cross"
    r"|global_|per_layer|memory|engram|ngram|heads?$|head_dim|kv_"
)
"""Names of fields that may decide how many bytes a layer's KV cache takes, or which tokens it keeps."""
OTHER = re.compile(r"token|^moe_|^mlp_|^linear_(dt|a)_")
"""Names of other parts: ids of tokens, experts, what a step of a state computes."""
_HARMLESS = """
    max_window_layers chunk_size conv_bias use_conv_bias
    mamba_chunk_size mamba_conv_bias mamba_proj_bias mamba_rms_norm mamba_norm_before_gate mamba_dt_rank mamba_expand
    mamba_hidden_act use_mamba_kernels mamba_ssm_dtype mamba_ssm_cache_dtype linear_allow_neg_eigval
    n_shared_experts num_shared_experts shared_expert_intermediate_size shared_intermediate_size
    activation_sparsity_pattern decoder_sparse_step num_logits_to_keep pruned_heads
    hidden_size_per_layer_input vocab_size_per_layer_input pretraining_tp mtp_layers_block_type
    mtp_hybrid_override_pattern
    num_mem_blocks use_shared_attention_adapter use_shared_mlp_adapter
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Fields with such names that decide what is computed, not what is kept."""


class Fields:
    """A config's fields by name; `source` names the config in errors. `read`: the names that were asked for."""

    def __init__(self, config: Config, source: str) -> None:
        self.config = config
        self.source = source
        self.read: set[str] = set()

    def get(self, name: str) -> object:
        self.read.add(name)
        return self.config.get(name)

    def unread(self) -> list[str]:
        """Return the fields that may decide the layout, are set, and were not asked for."""
        return sorted(
            name
            for name, value in self.config.items()
            if value and LAYOUT.search(name) and not OTHER.search(name) and name not in self.read | HARMLESS
        )

    def number(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return the first of the fields `names` that the config has, a whole number between `least` and `most`."""
        for name in names:
            value = self.get(name)
            if value is not None:
                return self._whole(name, value, least, most)
        if default is not None:
            return default
        raise UsageError(f"{self.source}: field {names[0]} is missing", "give the model's whole config.json")

    def _whole(self, name: str, value: object, least: int, most: int) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not least <= value <= most:  # type: ignore[operator]
            raise _wrong(name, value, f"a whole number from {least} to {most:,}", self.source)
        return int(value)  # type: ignore[call-overload, no-any-return]

    def items(self, name: str) -> list[Any]:
        """Return a field that is a list; empty if it is missing."""
        value = self.get(name)
        if value is None or isinstance(value, list):
            return value or []
        raise _wrong(name, value, "a list", self.source)

    def text(self, name: str) -> str:
        self.read.add(name)
        try:
            return text_of(self.config, name)
        except UsageError as error:
            raise UsageError(f"{self.source}: {error.message}", error.hint) from error

    def layers(self) -> int:
        listed = len(self.layer_kinds())
        return self.number("num_hidden_layers", default=listed or None, most=MOST_LAYERS)

    def layer_kinds(self) -> list[str]:
        """Return the kind of each layer in order; empty if the config does not list them."""
        if pattern := self.text("hybrid_override_pattern"):
            return list(pattern)
        kinds = self.items("layer_types") or self.items("layers_block_type")
        if not all(isinstance(kind, str) for kind in kinds):
            raise UsageError(
                f"{self.source}: field layer_types holds a value that is not text",
                "give the model's whole config.json",
            )
        return kinds


def _wrong(name: str, value: object, wanted: str, source: str = "") -> UsageError:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}.."
    return UsageError(
        f"{source}{': ' if source else ''}field {name} is {shown}, not {wanted}",
        "repair the model's config.json",
    )
