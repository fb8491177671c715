"""Reads a model's KV shape (`plan.ModelShape`) from its config.json: plain dicts, no vLLM, no transformers.

`FAMILIES` has all that differs between families: which fields they read, what a missing field means, the formula of a
state's tensors and their data type. Tests compare each with what vLLM computes. Sizes are per tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Literal

from kvtune.base.errors import UsageError
from kvtune.data.layout.fields import Config, Fields, text_config, text_of
from kvtune.data.layout.plan import ModelShape, StateTensor

ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float": 4,
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 1),
}
OF_LATENTS = frozenset(("qk_nope_head_dim", "qk_head_dim", "v_head_dim", "q_lora_rank"))
"""Fields of MLA's computation: what is kept is the latent vector."""

OWN_KV_TYPE = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Fields with which a quantized checkpoint chooses the KV cache's data type."""

ALTERNATING = ("sliding_attention", "full_attention")
KEEPS = {
    **dict.fromkeys(("full_attention", "attention", "*"), "all tokens"),
    "sliding_attention": "a window",
    **dict.fromkeys(("mamba", "M", "linear_attention", "conv", "short_conv"), "a state"),
    **dict.fromkeys(("moe", "mlp", "E", "-"), "nothing"),
}
"""What a layer of each kind keeps. In families whose layers all have a state, a `hybrid` one keeps all tokens, too."""

Shapes = dict[str, tuple[int, ...]]
Formula = Callable[[Fields, int], Shapes]
"""Returns the shapes of one layer's state tensors on one rank, given the number of ranks. `conv`: the conv window."""


def _mamba2(
    f: Fields,
    ranks: int,
    *,
    heads: str = "mamba_n_heads",
    size: str = "mamba_d_head",
    state: str = "mamba_d_state",
    groups: tuple[str, ...] = ("mamba_n_groups",),
    kernel: str = "mamba_d_conv",
    width: tuple[str, ...] | None = (),
    default_groups: int = 1,
) -> Shapes:
    """Each name is a field's. Without a field for the `width` the hidden size is expanded; None: heads x their size."""
    number = f.number(heads)
    if width is None:
        inner = number * f.number(size)
    else:
        inner = f.number(*width, default=f.number("mamba_expand", default=2) * f.number("hidden_size"))
    of_head = inner // number
    head_dim = of_head if f.get(size) == "auto" else f.number(size, default=of_head)
    states, parts = f.number(state), f.number(*groups, default=default_groups)
    # Where the groups do not divide evenly among the ranks, some are replicated.
    parts += ranks - parts if parts % ranks else 0
    channels = (inner + 2 * parts * states) // ranks
    return {
        "conv": (f.number(kernel, default=4) - 1, channels),
        "ssm": (ceil(number / ranks), head_dim, states),
    }


def _mamba1(f: Fields, ranks: int) -> Shapes:
    inner = f.number("mamba_expand", default=2) * f.number("hidden_size") // ranks
    return {"conv": (f.number("mamba_d_conv") - 1, inner), "ssm": (inner, f.number("mamba_d_state"))}


def _delta_net(f: Fields, ranks: int) -> Shapes:
    key_heads, value_heads = f.number("linear_num_key_heads"), f.number("linear_num_value_heads")
    key_dim, value_dim = f.number("linear_key_head_dim"), f.number("linear_value_head_dim")
    channels = (2 * key_heads * key_dim + value_heads * value_dim) // ranks
    return {
        "conv": (f.number("linear_conv_kernel_dim") - 1, channels),
        "recurrent": (value_heads // ranks, value_dim, key_dim),
    }


def _short_conv(f: Fields, ranks: int) -> Shapes:
    return {"conv": (f.number("conv_L_cache") - 1, f.number("conv_dim", "hidden_size") // ranks)}


def _all(f: Fields, layers: int) -> int:
    return layers


def _in(name: str) -> Callable[[Fields, int], int]:
    return lambda f, layers: len(f.items(name))


def _by_interval(f: Fields, layers: int) -> int:
    return layers // f.number("full_attention_interval", default=4)


def _by_period(f: Fields, layers: int) -> int:
    period, offset = f.number("attn_layer_period"), f.number("attn_layer_offset", least=0)
    return len(range(offset, layers, period)) if offset < period else 0


@dataclass(frozen=True, slots=True)
class Family:
    """What the arithmetic knows of a `model_type`, as transformers and vLLM read its config.json.

    heads_may_miss: without `num_key_value_heads` each head has its own keys and values; else transformers has a default
    of the family, and the field must be there. window_given: the same of `sliding_window`.
    size: whether `head_dim` must be there ("given"), or the hidden size divided by the heads stands for it if it is not
    ("either"), or nothing else is allowed ("derived"). inputs: hidden sizes that an attention layer reads; of two
    (Zamba2: hidden states and embeddings), only `attention_head_dim` is a head's size.
    windows: which layers have them if no list says so: "all", each but the last of a "pattern", none that is known
    ("listed"); "every other": vLLM has them there, whatever a list says. window_more: how many tokens more the window
    has in vLLM.
    latent: a token is one latent vector (MLA), whatever the heads.
    attention: how many layers have full attention if no list says so. both: all of them have a state, too.
    state_type: the field with the states' data type, and the type without it; None: always the model's type.
    flag_counts: --mamba-ssm-cache-dtype has an effect on a platform that keeps states in float32: vLLM applies it if
    transformers calls a layer `linear_attention`. checkpoints: a kernel of vLLM keeps these states inside a chunk.
    """

    states: Formula | None = None
    attention: Callable[[Fields, int], int] = _all
    both: bool = False
    heads_may_miss: bool = False
    size: Literal["given", "either", "derived"] = "derived"
    inputs: int = 1
    windows: Literal["listed", "all", "pattern", "every other"] = "listed"
    window_given: bool = False
    window_more: int = 0
    latent: bool = False
    state_type: tuple[str, str] | None = ("", "auto")
    flag_counts: bool = True
    checkpoints: bool = False


_NEMOTRON = partial(
    _mamba2,
    heads="mamba_num_heads",
    size="mamba_head_dim",
    state="ssm_state_size",
    groups=("n_groups", "mamba_n_groups"),
    kernel="conv_kernel",
    width=None,
    default_groups=8,
)
_ZAMBA = partial(_mamba2, heads="n_mamba_heads", size="mamba_headdim", groups=("mamba_ngroups",))
_LFM2 = Family(_short_conv, _in("full_attn_idxs"), state_type=None)
_QWEN = Family(_delta_net, _by_interval, size="given", checkpoints=True)
_QWEN35 = replace(_QWEN, state_type=("mamba_ssm_dtype", "auto"))
_GIVEN = "ernie4_5 gemma gemma3n glm4 hy_v3 minimax_m2 qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss"


def _each(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


FAMILIES: dict[str, Family] = {
    **_each("granite llama olmo2 olmo3", Family(heads_may_miss=True, size="either")),
    **_each("apertus arcee cohere granitemoe olmo olmoe opt", Family(heads_may_miss=True)),
    "cohere2": Family(heads_may_miss=True, size="either", window_more=1),
    **_each("exaone4 glm4_moe mixtral", Family(size="either")),
    **_each("ernie4_5_moe qwen2 qwen2_moe smollm3", Family()),
    **_each(_GIVEN, Family(size="given")),
    "gemma3": Family(size="given", windows="pattern"),
    "gpt_oss": Family(size="given", windows="every other"),
    **_each("deepseek_v3 glm4_moe_lite kimi_k2", Family(heads_may_miss=True, size="either", latent=True)),
    "mistral": Family(size="either", windows="all", window_given=True),
    "phi3": Family(heads_may_miss=True, size="either", windows="all"),
    "bamba": Family(_mamba2, _in("attn_layer_indices")),
    "falcon_h1": Family(
        partial(_mamba2, width=("mamba_d_ssm",)), both=True, size="either", flag_counts=False
    ),
    "granitemoehybrid": Family(_mamba2, _in("attn_layer_indices"), heads_may_miss=True),
    "jamba": Family(_mamba1, _by_period),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "nemotron_h": Family(_NEMOTRON, size="given", state_type=("mamba_ssm_cache_dtype", "float32")),
    "olmo_hybrid": Family(_delta_net, _by_interval, heads_may_miss=True),
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_next": _QWEN,
    "zamba2": Family(_ZAMBA, _in("hybrid_layer_ids"), both=True, heads_may_miss=True, inputs=2),
}


def shape_of(
    config: Config,
    name: str = "",
    *,
    tensor_parallel: int = 1,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    state_dtype: str = "auto",
    float32_states: bool = False,
    drafts: int = 0,
) -> ModelShape:
    """Return the shape of the model that `config` describes, on one of `tensor_parallel` ranks.

    `dtype`, `kv_cache_dtype`, `state_dtype` are vLLM's --dtype, --kv-cache-dtype, --mamba-ssm-cache-dtype.
    `float32_states`: the platform keeps states in float32 (`Platform`). `drafts`: tokens that its own MTP layer drafts:
    the layer keeps all tokens, and windows of convolutions are longer by them.
    """
    model_type, text = family_of(config), text_config(config)
    fields = Fields(text, name or text_of(config, "model_type") or "config.json")
    model_dtype = _model_dtype(config, dtype)
    if model_type not in FAMILIES:
        raise only_vllm(fields.source, f"field model_type: kvtune has no arithmetic for {model_type[:40]!r}")
    family = FAMILIES[model_type]
    of_states = state_dtype_of(config, dtype=dtype, state_dtype=state_dtype, float32_states=float32_states)
    shapes = family.states(fields, tensor_parallel) if family.states else {}
    full, windows, with_state = _layers(fields, model_type, family)
    if with_state < 0:
        raise UsageError(
            f"{fields.source}: field num_hidden_layers is {fields.layers()}, fewer than the layers that are listed",
            "repair the model's config.json",
        )
    latent, heads = 0, fields.number("num_attention_heads")
    if family.latent:
        latent = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
        fields.read |= OF_LATENTS
    kv_heads = fields.number("num_key_value_heads", default=heads if family.heads_may_miss else None)
    shape = ModelShape(
        name=fields.source,
        attention_layers=full + (drafts > 0),
        kv_heads=max(1, kv_heads // tensor_parallel),
        head_dim=_head_dim(fields, heads, family),
        kv_element_bytes=ELEMENT_BYTES[_dtype(kv_cache_dtype, model_dtype)],
        state_layers=with_state,
        states=tuple(
            StateTensor(
                tensor,
                (sizes[0] + drafts * (tensor == "conv"), *sizes[1:]),
                ELEMENT_BYTES[model_dtype if tensor == "conv" else of_states],
            )
            for tensor, sizes in shapes.items()
        ),
        state_dtype=of_states,
        window_layers=windows,
        window=fields.number("sliding_window") + family.window_more if windows else 0,
        latent=latent,
        delta_heads=fields.number("linear_key_head_dim") if family.checkpoints else 0,
    )
    if unread := fields.unread():
        named = f"{'field' if len(unread) == 1 else 'fields'} {', '.join(unread[:3])[:120]}"
        why = f"may decide the KV layout, which kvtune's arithmetic for {model_type!r} does not read"
        raise only_vllm(fields.source, f"{named} {why}")
    quantized = [part.get("quantization_config") for part in (config, text)]
    own = [key for part in quantized if isinstance(part, dict) for key in OWN_KV_TYPE if part.get(key)]
    if own and kv_cache_dtype == "auto":
        raise only_vllm(
            fields.source, f"the checkpoint sets its own KV data type (field quantization_config.{own[0]})"
        )
    return shape


def _layers(fields: Fields, model_type: str, family: Family) -> tuple[int, int, int]:
    """Return the numbers of layers with full attention, with sliding windows, and with states."""
    layers, kinds = fields.layers(), fields.layer_kinds()
    full, windows = family.attention(fields, layers), 0
    if kinds:
        keeps = {kind: kept for kind, kept in KEEPS.items() if family.states or kept != "a state"}
        if family.both:
            keeps["hybrid"] = "all tokens"
        if strange := sorted(set(kinds) - keeps.keys()):
            why = f"kvtune has no arithmetic for {strange[0][:40]!r}"
            raise only_vllm(fields.source, f"field layer_types: {why}")
        if len(kinds) != layers:
            raise only_vllm(fields.source, f"field layer_types lists {len(kinds)} of {layers} layers")
        if family.windows == "every other" and kinds != [*ALTERNATING * layers][:layers]:
            why = "vLLM has windows in every other layer, whatever it says"
            raise only_vllm(fields.source, f"field layer_types: {why}")
        # The last layers of Gemma 3n keep nothing: they read what earlier layers of their kind have kept.
        shared = fields.number("num_kv_shared_layers", default=0, least=0, most=layers)
        kept = [keeps[kind] for kind in kinds[: layers - shared]]
        states = layers if family.both else kept.count("a state")
        return kept.count("all tokens"), kept.count("a window"), states
    if family.window_given and "sliding_window" not in fields.config:
        raise only_vllm(
            fields.source, f"field sliding_window is missing, for which {model_type!r} has a default"
        )
    window = fields.number("sliding_window", default=0, least=0)
    if fields.get("use_sliding_window") is False:
        window = 0
    # Other families' classes pass over the pattern, or know another one.
    patterned = family.windows == "pattern"
    pattern = fields.number("sliding_window_pattern", default=0, least=0) if patterned else 0
    if window and pattern:
        full, windows = layers // pattern, layers - layers // pattern
    elif window and family.windows == "all":
        full, windows = 0, layers
    elif window:
        fields.read.discard("sliding_window")  # which layers have it is not told
    if family.states is None:
        return full, windows, 0
    return full, windows, layers if family.both else layers - full


def _head_dim(fields: Fields, heads: int, family: Family) -> int:
    names = ("head_dim", "attention_head_dim")[family.inputs > 1 :]
    given = fields.number(*names, default=None if family.size == "given" else 0)
    if given and family.size != "derived":
        return given
    derived = family.inputs * fields.number("hidden_size") // heads
    if not derived:
        raise UsageError(
            f"{fields.source}: field hidden_size is too small for {heads:,} heads",
            "repair the model's config.json",
        )
    if fields.get("head_dim") and given != derived:
        why = f"hidden_size / num_attention_heads is {derived}: which of them counts is not known"
        raise only_vllm(fields.source, f"field head_dim is {given}, and {why}")
    return given or derived


def family_of(config: Config) -> str:
    """Return the model's family, its key in `FAMILIES`: the `model_type` without `_text`."""
    text = text_config(config)
    return (text_of(text, "model_type") or text_of(config, "model_type")).removesuffix("_text")


def state_dtype_of(
    config: Config, *, dtype: str = "auto", state_dtype: str = "auto", float32_states: bool = False
) -> str:
    """Return the recurrent states' data type: from the flag, else by vLLM's rule for the family, else the model's.

    `float32_states` makes it float32, unless the flag asks for a 16-bit type and vLLM applies it. Empty for a model
    without states. Parameters as in `shape_of`.
    """
    family = FAMILIES.get(family_of(config))
    if family is None or family.states is None:
        return ""
    model_dtype, requested = _model_dtype(config, dtype), state_dtype
    if family.state_type is None:
        return model_dtype
    if requested == "auto":
        field, default = family.state_type
        requested = text_of(text_config(config), field) or default
    if float32_states and not (family.flag_counts and requested in ("float16", "bfloat16")):
        return "float32"
    return _dtype(requested, model_dtype)


def _model_dtype(config: Config, requested: str) -> str:
    text = text_config(config)
    own = text_of(text, "dtype") or text_of(text, "torch_dtype") or text_of(config, "dtype") or "bfloat16"
    return _dtype(requested, own)


def _dtype(requested: str, fallback: str) -> str:
    name = str(fallback if requested == "auto" else requested).removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        raise UsageError(
            f"data type {name[:40]!r} is not supported", f"supported: {', '.join(ELEMENT_BYTES)}"
        )
    return name


def only_vllm(source: str, message: str) -> UsageError:
    """Return the error of what the arithmetic does not know of a model: vLLM does."""
    return UsageError(
        f"{source}: {message}",
        "install vLLM beside kvtune (pip install 'kvtune[cpu]', on a GPU 'kvtune[cuda]'): `kvtune doctor` then asks it",
    )
