"""Reads a model's KV shape (`plan.ModelShape`) from its config.json: plain dicts, no vLLM, no transformers.

One reader per family of state layers; tests compare each with what vLLM computes. Sizes are per tensor-parallel rank.
The recurrent states' data type follows vLLM's rule for each family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TypedDict

from kvtune.errors import UsageError
from kvtune.layout.fields import Config, Fields, text_config, text_of
from kvtune.layout.plan import ModelShape, StateTensor

ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


class StateTypes(TypedDict):
    """The settings that decide the data type of recurrent states: --dtype, --mamba-ssm-cache-dtype, the platform."""

    dtype: str
    state_dtype: str
    float32_states: bool


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `ranks` tensor-parallel ranks, and bytes per element: of convolution windows, and of other states."""

    ranks: int
    conv_bytes: int
    state_bytes: int


States = tuple[StateTensor, ...]
Reader = Callable[[Fields, Rank], tuple[int, States]]
"""Returns the number of layers with states, and the states of one layer."""


def shape_of(
    config: Config,
    name: str = "",
    *,
    tensor_parallel: int = 1,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    state_dtype: str = "auto",
    float32_states: bool = False,
) -> ModelShape:
    """Return the shape of the model that `config` describes, on one of `tensor_parallel` ranks.

    `dtype`, `kv_cache_dtype`, `state_dtype` are vLLM's --dtype, --kv-cache-dtype, --mamba-ssm-cache-dtype.
    `float32_states`: the platform keeps states in float32 (`plan.Backend`).
    """
    family = family_of(config)
    text = text_config(config)
    fields = Fields(text, name or text_of(config, "model_type") or "config.json")
    model_dtype = _model_dtype(config, dtype)
    reader = STATE_READERS.get(family)
    state_layers: int = 0
    states: States = ()
    if reader is not None:
        resolved = state_dtype_of(config, dtype=dtype, state_dtype=state_dtype, float32_states=float32_states)
        rank = Rank(tensor_parallel, ELEMENT_BYTES[model_dtype], ELEMENT_BYTES[resolved])
        state_layers, states = reader(fields, rank)
    elif {"mamba", "linear_attention"} & set(fields.layer_kinds()):
        raise UsageError(
            f"{fields.source}: field model_type: state layers of {family[:40]!r} are not supported by the planner",
            f"supported: {', '.join(sorted(STATE_READERS))}; with vLLM installed, `kvtune doctor` asks vLLM",
        )
    attention, window_layers = _attention_layers(fields, family, state_layers)
    if attention < 0 or state_layers < 0:
        raise UsageError(
            f"{fields.source}: field num_hidden_layers is {fields.layers()}, fewer than the layers that are listed",
            "repair the model's config.json",
        )
    return ModelShape(
        name=fields.source,
        attention_layers=attention,
        kv_heads=max(1, fields.kv_heads() // tensor_parallel),
        head_dim=fields.head_dim(),
        kv_element_bytes=ELEMENT_BYTES[_dtype(kv_cache_dtype, model_dtype)],
        state_layers=state_layers,
        states=states,
        window_layers=window_layers,
        window=fields.number("sliding_window", default=0, least=0) if window_layers else 0,
    )


def _dtype(requested: str, fallback: str) -> str:
    name = str(fallback if requested == "auto" else requested).removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        raise UsageError(
            f"data type {name[:40]!r} is not supported", f"supported: {', '.join(ELEMENT_BYTES)}"
        )
    return name


def _model_dtype(config: Config, requested: str) -> str:
    text = text_config(config)
    return _dtype(
        requested,
        text_of(text, "dtype") or text_of(text, "torch_dtype") or text_of(config, "dtype") or "bfloat16",
    )


def state_dtype_of(
    config: Config, *, dtype: str = "auto", state_dtype: str = "auto", float32_states: bool = False
) -> str:
    """Return the recurrent states' data type: from the flag, else by vLLM's rule for the family, else the model's.

    `float32_states` makes it float32, unless the flag asks for a 16-bit type and vLLM applies it. Empty for a model
    without states. Parameters as in `shape_of`.
    """
    family, text = family_of(config), text_config(config)
    if family not in STATE_READERS:
        return ""
    model_dtype, requested = _model_dtype(config, dtype), state_dtype
    if (
        STATE_READERS[family] is _short_conv
    ):  # these states are convolution windows, always of the model's type
        return model_dtype
    if requested == "auto":
        if family == "nemotron_h":
            requested = text_of(text, "mamba_ssm_cache_dtype") or "float32"
        elif family.startswith("qwen3_5"):
            requested = text_of(text, "mamba_ssm_dtype") or "auto"
    if float32_states and not (keeps_requested_state_dtype(family) and requested in ("float16", "bfloat16")):
        return "float32"
    return _dtype(requested, model_dtype)


def keeps_requested_state_dtype(family: str) -> bool:
    """Whether --mamba-ssm-cache-dtype has an effect on a platform that keeps states in float32.

    vLLM applies the flag if transformers calls a layer `linear_attention`, as in most families with Mamba layers.
    """
    return family != "falcon_h1"


def family_of(config: Config) -> str:
    """Return the model's family, its key in `STATE_READERS`: the `model_type` without `_text`."""
    text = text_config(config)
    return (text_of(text, "model_type") or text_of(config, "model_type")).removesuffix("_text")


def _attention_layers(fields: Fields, family: str, state_layers: int) -> tuple[int, int]:
    """Return the numbers of layers with full attention and with sliding windows."""
    layers = fields.layers()
    kinds = fields.layer_kinds()
    if family == "falcon_h1":  # every layer has both attention and a state
        return layers, 0
    if family == "zamba2":
        return sum(kind == "hybrid" for kind in kinds) or len(fields.items("hybrid_layer_ids")), 0
    if family == "jamba":
        return layers - state_layers, 0
    if family == "bamba":
        return len(fields.items("attn_layer_indices")) or kinds.count("attention"), 0
    if fields.text("hybrid_override_pattern"):
        return kinds.count("*"), 0
    if kinds:
        windowed = kinds.count("sliding_attention")
        whole = kinds.count("full_attention") + kinds.count("attention")
        return whole, windowed
    pattern = fields.number("sliding_window_pattern", default=0, least=0)
    if pattern and fields.number("sliding_window", default=0, least=0):
        whole = layers // pattern
        return whole, layers - whole
    return layers - state_layers, 0


def _mamba2(
    rank: Rank, inner: int, heads: int, head_dim: int, state: int, groups: int, kernel: int
) -> States:
    # Where the groups do not divide evenly among the ranks, some are replicated.
    groups += 0 if groups % rank.ranks == 0 else rank.ranks - groups
    conv = (kernel - 1, (inner + 2 * groups * state) // rank.ranks)
    return (
        StateTensor("conv", conv, rank.conv_bytes),
        StateTensor("ssm", (ceil(heads / rank.ranks), head_dim, state), rank.state_bytes),
    )


def _mamba2_of_bamba(f: Fields, rank: Rank, inner: int) -> States:
    """Return the states, from the field names that Bamba, Granite and Falcon-H1 share."""
    heads = f.number("mamba_n_heads")
    auto = f.config.get("mamba_d_head") == "auto"
    return _mamba2(
        rank,
        inner,
        heads,
        inner // heads if auto else f.number("mamba_d_head", default=inner // heads),
        f.number("mamba_d_state"),
        f.number("mamba_n_groups", default=1),
        f.number("mamba_d_conv", default=4),
    )


def _granite(f: Fields, rank: Rank) -> tuple[int, States]:
    inner = f.number("mamba_expand", default=2) * f.number("hidden_size")
    states = _mamba2_of_bamba(f, rank, inner)
    kinds = f.layer_kinds()
    if kinds:
        return sum(kind in ("mamba", "linear_attention") for kind in kinds), states
    return f.layers() - len(f.items("attn_layer_indices")), states


def _falcon_h1(f: Fields, rank: Rank) -> tuple[int, States]:
    inner = f.number("mamba_d_ssm", default=f.number("mamba_expand", default=2) * f.number("hidden_size"))
    return f.layers(), _mamba2_of_bamba(f, rank, inner)


def _nemotron_h(f: Fields, rank: Rank) -> tuple[int, States]:
    heads, head_dim = f.number("mamba_num_heads"), f.number("mamba_head_dim")
    states = _mamba2(
        rank,
        heads * head_dim,
        heads,
        head_dim,
        f.number("ssm_state_size"),
        f.number("n_groups", "mamba_n_groups", default=8),
        f.number("conv_kernel", default=4),
    )
    kinds = f.layer_kinds()
    return sum(kind in ("M", "mamba", "linear_attention") for kind in kinds), states


def _zamba2(f: Fields, rank: Rank) -> tuple[int, States]:
    inner = f.number("mamba_expand", default=2) * f.number("hidden_size")
    heads = f.number("n_mamba_heads")
    states = _mamba2(
        rank,
        inner,
        heads,
        f.number("mamba_headdim", default=inner // heads),
        f.number("mamba_d_state"),
        f.number("mamba_ngroups", default=1),
        f.number("mamba_d_conv", default=4),
    )
    return f.layers(), states


def _jamba(f: Fields, rank: Rank) -> tuple[int, States]:
    inner = f.number("mamba_expand", default=2) * f.number("hidden_size") // rank.ranks
    states = (
        StateTensor("conv", (f.number("mamba_d_conv") - 1, inner), rank.conv_bytes),
        StateTensor("ssm", (inner, f.number("mamba_d_state")), rank.state_bytes),
    )
    layers = f.layers()
    period, offset = f.number("attn_layer_period"), f.number("attn_layer_offset", least=0)
    return sum(layer % period != offset for layer in range(layers)), states


def _delta_net(f: Fields, rank: Rank) -> tuple[int, States]:
    key_heads, value_heads = f.number("linear_num_key_heads"), f.number("linear_num_value_heads")
    key_dim, value_dim = f.number("linear_key_head_dim"), f.number("linear_value_head_dim")
    channels = (2 * key_heads * key_dim + value_heads * value_dim) // rank.ranks
    states = (
        StateTensor("conv", (f.number("linear_conv_kernel_dim") - 1, channels), rank.conv_bytes),
        StateTensor("recurrent", (value_heads // rank.ranks, value_dim, key_dim), rank.state_bytes),
    )
    kinds = f.layer_kinds()
    layers = f.layers()
    if kinds:
        return kinds.count("linear_attention"), states
    return layers - layers // f.number("full_attention_interval", default=4), states


def _short_conv(f: Fields, rank: Rank) -> tuple[int, States]:
    width = f.number("conv_dim", "hidden_size") // rank.ranks
    states = (StateTensor("conv", (f.number("conv_L_cache") - 1, width), rank.conv_bytes),)
    kinds = f.layer_kinds()
    if kinds:
        return sum(kind in ("conv", "short_conv") for kind in kinds), states
    return f.layers() - len(f.items("full_attn_idxs")), states


STATE_READERS: dict[str, Reader] = {
    "bamba": _granite,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _delta_net,
    "qwen3_5": _delta_net,
    "qwen3_5_moe": _delta_net,
    "qwen3_next": _delta_net,
    "zamba2": _zamba2,
}
