"""Reads a model's KV shape (`plan.ModelShape`) from its config.json: plain dicts, no vLLM, no transformers.

One reader per family of state layers; tests compare each with what vLLM computes. Sizes are per tensor-parallel rank.
The recurrent states' data type follows vLLM's rule for each family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal, TypedDict

from kvtune.base.errors import UsageError
from kvtune.data.layout.fields import Config, Fields, text_config, text_of
from kvtune.data.layout.plan import ModelShape, StateTensor

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
    if family not in FAMILIES:
        raise only_vllm(f"{fields.source}: field model_type: kvtune has no arithmetic for {family[:40]!r}")
    table = FAMILIES[family]
    state_layers: int = 0
    states: States = ()
    if table.states is not None:
        resolved = state_dtype_of(config, dtype=dtype, state_dtype=state_dtype, float32_states=float32_states)
        rank = Rank(tensor_parallel, ELEMENT_BYTES[model_dtype], ELEMENT_BYTES[resolved])
        state_layers, states = table.states(fields, rank)
    attention, window_layers = _attention_layers(fields, family, state_layers)
    if attention < 0 or state_layers < 0:
        raise UsageError(
            f"{fields.source}: field num_hidden_layers is {fields.layers()}, fewer than the layers that are listed",
            "repair the model's config.json",
        )
    latent = 0
    if table.latent:
        latent = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
        fields.read |= OF_LATENTS
    shape = ModelShape(
        name=fields.source,
        attention_layers=attention,
        kv_heads=max(1, fields.kv_heads(may_miss=table.heads_may_miss) // tensor_parallel),
        head_dim=_head_dim(fields, table),
        kv_element_bytes=ELEMENT_BYTES[_dtype(kv_cache_dtype, model_dtype)],
        state_layers=state_layers,
        states=states,
        window_layers=window_layers,
        window=fields.number("sliding_window") + table.window_more if window_layers else 0,
        latent=latent,
        delta_heads=fields.number("linear_key_head_dim") if table.checkpoints else 0,
    )
    if unread := fields.unread():
        names = ", ".join(unread[:3])
        raise only_vllm(
            f"{fields.source}: {'field' if len(unread) == 1 else 'fields'} {names[:120]} may decide the KV layout, "
            f"which kvtune's arithmetic for {family!r} does not read"
        )
    if kv_cache_dtype == "auto" and (own := _own_kv_type(config, text)):
        raise only_vllm(f"{fields.source}: the checkpoint sets its own KV data type (field {own})")
    return shape


def _head_dim(fields: Fields, family: Family) -> int:
    size = fields.head_dim(may_miss=family.size != "given")
    if family.size == "derived" and fields.get("head_dim"):
        derived = fields.number("hidden_size") // fields.number("num_attention_heads")
        if size != derived:
            raise only_vllm(
                f"{fields.source}: field head_dim is {size}, and hidden_size / num_attention_heads is {derived}: "
                "which of them counts is not known"
            )
    return size


def only_vllm(message: str) -> UsageError:
    """Return the error of what the arithmetic does not know: vLLM does."""
    return UsageError(
        message,
        "install vLLM beside kvtune (pip install 'kvtune[cpu]', on a GPU 'kvtune[cuda]'): `kvtune doctor` then asks it",
    )


def _own_kv_type(config: Config, text: Config) -> str:
    """Return the field with which a quantized checkpoint chooses the KV cache's data type; empty if none does."""
    for part in (config, text):
        quantized = part.get("quantization_config")
        if isinstance(quantized, dict):
            for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
                if quantized.get(name):
                    return f"quantization_config.{name}"
    return ""


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
    if family not in FAMILIES or FAMILIES[family].states is None:
        return ""
    model_dtype, requested = _model_dtype(config, dtype), state_dtype
    if (
        FAMILIES[family].states is _short_conv
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
    """Return the model's family, its key in `FAMILIES`: the `model_type` without `_text`."""
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
    if strange := sorted(set(kinds) - KINDS):
        raise only_vllm(
            f"{fields.source}: field layer_types: kvtune has no arithmetic for {strange[0][:40]!r}"
        )
    if kinds and len(kinds) != layers:
        raise only_vllm(f"{fields.source}: field layer_types lists {len(kinds)} of {layers} layers")
    if family == "gpt_oss" and any(
        kind != ("full_attention" if number % 2 else "sliding_attention") for number, kind in enumerate(kinds)
    ):
        raise only_vllm(
            f"{fields.source}: field layer_types: vLLM has windows in every other layer, whatever it says"
        )
    if kinds:
        # The last layers of Gemma 3n keep nothing: they read what earlier layers of their kind have kept.
        kinds = kinds[: layers - fields.number("num_kv_shared_layers", default=0, least=0, most=layers)]
        return kinds.count("full_attention") + kinds.count("attention"), kinds.count("sliding_attention")
    if FAMILIES[family].window_given and "sliding_window" not in fields.config:
        raise only_vllm(
            f"{fields.source}: field sliding_window is missing, for which {family!r} has a default"
        )
    window = fields.number("sliding_window", default=0, least=0)
    if fields.get("use_sliding_window") is False:
        window = 0
    # Other families' classes pass over the pattern, or know another one.
    pattern = fields.number("sliding_window_pattern", default=0, least=0) if family == "gemma3" else 0
    if pattern and window:
        whole = layers // pattern
        return whole, layers - whole
    if window and state_layers == 0 and FAMILIES[family].windows_only:
        return 0, layers
    if window:
        fields.read.discard("sliding_window")  # which layers have it is not told
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
    auto = f.get("mamba_d_head") == "auto"
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


@dataclass(frozen=True, slots=True)
class Family:
    """What the arithmetic knows of a `model_type`, as transformers and vLLM read its config.json.

    heads_may_miss: without `num_key_value_heads` each head has its own keys and values; else transformers has a default
    of the family, and the field must be there. window_given: the same of `sliding_window`.
    size: whether `head_dim` must be there ("given"), or the hidden size divided by the heads stands for it if it is not
    ("either"), or nothing else is allowed ("derived").
    windows_only: a `sliding_window` that no other field restricts is every layer's. window_more: how many tokens more
    the window has in vLLM. latent: a token is one latent vector (MLA), whatever the heads.
    checkpoints: the states are Qwen's gated delta net's, which a kernel of vLLM keeps inside a chunk.
    """

    states: Reader | None = None
    heads_may_miss: bool = False
    size: Literal["given", "either", "derived"] = "derived"
    windows_only: bool = False
    window_given: bool = False
    window_more: int = 0
    latent: bool = False
    checkpoints: bool = False


KINDS = frozenset(
    (
        *(
            "full_attention",
            "attention",
            "sliding_attention",
            "mamba",
            "linear_attention",
            "conv",
            "short_conv",
        ),
        *("moe", "mlp"),
    )
)
"""Kinds of layers that the readers count, or that keep nothing."""
OF_LATENTS = frozenset(("qk_nope_head_dim", "qk_head_dim", "v_head_dim", "q_lora_rank"))
"""Fields of MLA's computation: what is kept is the latent vector."""


def _each(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


FAMILIES: dict[str, Family] = {
    **_each("granite llama olmo2 olmo3", Family(heads_may_miss=True, size="either")),
    **_each("apertus arcee cohere granitemoe olmo olmoe opt", Family(heads_may_miss=True)),
    "cohere2": Family(heads_may_miss=True, size="either", window_more=1),
    **_each("exaone4 glm4_moe mixtral", Family(size="either")),
    **_each("ernie4_5_moe qwen2 qwen2_moe smollm3", Family()),
    **_each(
        "ernie4_5 gemma gemma3 gemma3n glm4 gpt_oss hy_v3 minimax_m2 qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss",
        Family(size="given"),
    ),
    **_each("deepseek_v3 glm4_moe_lite kimi_k2", Family(heads_may_miss=True, size="either", latent=True)),
    "mistral": Family(size="either", windows_only=True, window_given=True),
    "phi3": Family(heads_may_miss=True, size="either", windows_only=True),
    "bamba": Family(_granite),
    "falcon_h1": Family(_falcon_h1, size="either"),
    "granitemoehybrid": Family(_granite, heads_may_miss=True),
    "jamba": Family(_jamba),
    "lfm2": Family(_short_conv),
    "lfm2_moe": Family(_short_conv),
    "nemotron_h": Family(_nemotron_h, size="given"),
    "olmo_hybrid": Family(_delta_net, heads_may_miss=True),
    "qwen3_5": Family(_delta_net, size="given", checkpoints=True),
    "qwen3_5_moe": Family(_delta_net, size="given", checkpoints=True),
    "qwen3_next": Family(_delta_net, size="given", checkpoints=True),
    "zamba2": Family(_zamba2, heads_may_miss=True),
}
