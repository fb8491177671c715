"""Facts that the planner (`kvtune.data.layout`) works out from a config.json, with or without vLLM's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvtune.answers.doctor.facts import Facts, Group
from kvtune.base import children
from kvtune.base.errors import UsageError
from kvtune.data.flags import flag_texts, flag_value, settings_given
from kvtune.data.layout.config import (
    StateTypes,
    family_of,
    keeps_requested_state_dtype,
    only_vllm,
    shape_of,
    state_dtype_of,
)
from kvtune.data.layout.fields import Config, Fields, text_config
from kvtune.data.layout.model_config import model_config
from kvtune.data.layout.models import engine_defaults
from kvtune.data.layout.plan import (
    CPU,
    CPU_BF16,
    GPU,
    Backend,
    BlockPlan,
    ModelShape,
    backend_of,
    cpu_backend,
    plan_per_layer,
)
from kvtune.data.platforms import MIB, Platform, cpu, defaults, origins
from kvtune.lab.setup.platform import gpus
from kvtune.lab.setup.resolve import ranks, tensor_parallel

SOME_GPU = Platform("cuda", "a GPU")
"""A GPU of unknown kind: vLLM's defaults for tokens and requests in a step are not known."""


def planners_backend(facts: Facts) -> Backend:
    """Return the planner's description of the device."""
    if facts.device.startswith("cpu"):
        return cpu_backend(bool(facts.avx512_bf16))
    return replace(GPU, delta_step=facts.state_step)


def shape_from(facts: Facts, backend: Backend, *, state_dtype: str = "") -> ModelShape:
    return shape_of(
        facts.config,
        facts.model,
        dtype=facts.dtype or "auto",
        kv_cache_dtype=facts.kv_cache_dtype or "auto",
        state_dtype=state_dtype or facts.given.get("mamba-ssm-cache-dtype", "auto"),
        float32_states=backend.float32_states,
    )


def requested_block(facts: Facts) -> int | None:
    requested = facts.given.get("block-size", "")
    return int(requested) if requested.isdigit() else None


def assumed_platform() -> Platform:
    """Return the platform to assume without vLLM: a GPU if `nvidia-smi` is on PATH, else this machine's CPU."""
    if not children.program("nvidia-smi"):
        return cpu()
    first = next(iter(gpus()), None)
    return Platform("cuda", first.name, first.total * MIB, first.capability) if first else SOME_GPU


def with_origins(facts: Facts, platform: Platform, engine_args: Sequence[str]) -> Facts:
    """Add the origins of max_num_batched_tokens, max_num_seqs and block_size.

    If vLLM was not asked, also add the first two values: from the flags, else vLLM's defaults.
    """
    taken = defaults(platform, ranks(engine_args))
    decided = origins(settings_given(engine_args), frozenset(), platform.title)
    words = {
        name: why if why == "flag" else f"{why}, by {taken[name].source}" for name, why in decided.items()
    }
    facts = msgspec.structs.replace(facts, origins=words)
    if facts.source == "vllm" or platform == SOME_GPU:
        return facts
    given = facts.given
    tokens, requests = (
        int(given[flag]) if given.get(flag, "").isdigit() else int(taken[flag.replace("-", "_")].value)
        for flag in ("max-num-batched-tokens", "max-num-seqs")
    )
    return msgspec.structs.replace(facts, batched_tokens=tokens, max_requests=requests)


def read_config(model: str, engine_args: Sequence[str], platform: Platform | None = None) -> Facts:
    """Return facts planned from config.json alone, for `platform` or else an assumed one; `Facts.assumed` names it."""
    platform = platform or assumed_platform()
    device = platform.runs_on
    config = config_of(model, flag_value(engine_args, "revision"))
    flags = {**engine_defaults(model, device), **flag_texts(engine_args)}
    float32, backend = platform.float32_states, backend_of(platform, flags.get("attention-backend", ""))
    caching = "no-enable-prefix-caching" not in flags
    other_kernel = flags.get("gdn-prefill-backend", "auto") not in ("auto", "flashinfer")
    backend = replace(backend, delta_step=1) if other_kernel or not caching else backend
    types: StateTypes = {
        "dtype": flags.get("dtype", "auto"),
        "state_dtype": flags.get("mamba-ssm-cache-dtype", "auto"),
        "float32_states": float32,
    }
    if ranks(engine_args) > tensor_parallel(engine_args):
        raise only_vllm(f"{model}: which layers each rank of --pipeline-parallel-size holds is vLLM's choice")
    shape = shape_of(
        config,
        model,
        tensor_parallel=tensor_parallel(engine_args),
        kv_cache_dtype=flags.get("kv-cache-dtype", "auto"),
        **types,
    )
    if (
        shape.latent
        and "block-size" not in flags
        and (platform.capability[0], shape.kv_element_bytes) != (9, 2)
    ):
        raise only_vllm(f"{model}: the block of its attention (MLA) on {platform.title} is not known")
    requested = flags.get("block-size")
    plan = plan_per_layer(shape, backend, int(requested) if requested and requested.isdigit() else None)
    has = "with AVX-512 BF16, so recurrent states in float32" if float32 else "without AVX-512 BF16"
    assumed = f"this machine's CPU, {has}" if device == "cpu" else "a GPU, states of the config's type"
    assumed += ", blocks as in vLLM 0.33" if backend.state_step(shape) > 1 else ""
    text = Fields(text_config(config), model)
    length = flags.get("max-model-len", "")
    return Facts(
        source="config",
        model=model,
        architecture=", ".join(map(str, Fields(config, model).items("architectures"))),
        device=f"{device} (assumed)",
        dtype=flags.get("dtype") or (text.text("dtype") or text.text("torch_dtype")),
        avx512_bf16=float32 if device == "cpu" else None,
        assumed=assumed,
        state_dtype=state_dtype_of(config, **types),
        given=flag_texts(engine_args),
        max_model_len=int(length)
        if length.isdigit()
        else text.number("max_position_embeddings", default=0, least=0),
        caching=caching,
        block_tokens=plan.block_tokens,
        default_block_tokens=backend.default,
        state_step=backend.state_step(shape),
        state_mode="align" if shape.hybrid else "",
        match_unit=int(flags["prefix-match-unit"]) if flags.get("prefix-match-unit", "").isdigit() else 0,
        retention=0,
        hash_tokens=plan.block_tokens,
        hit_tokens=plan.block_tokens,
        groups=_planned_groups(shape, plan),
        group_layers=plan.attention_group_layers,
        config=config,
    )


def _planned_groups(shape: ModelShape, plan: BlockPlan) -> list[Group]:
    page = plan.block_tokens * shape.layer_token_bytes
    kinds = (
        ("full attention", plan.attention_groups, shape.attention_layers, page, 0),
        ("sliding window", plan.window_groups, shape.window_layers, page, shape.window),
        ("state", plan.state_groups, shape.state_layers, shape.state_bytes, 0),
    )
    return [
        Group(
            kind=kind,  # type: ignore[arg-type]
            layers=len(range(number, layers, groups)),
            block_tokens=plan.block_tokens,
            page_bytes=page,
            used_bytes=used,
            window=window,
        )
        for kind, groups, layers, used, window in kinds
        for number in range(groups)
    ]


def config_of(model: str, revision: str | None = None) -> Config:
    """Return the model's config.json; UsageError if it cannot be read."""
    config = model_config(model, revision)
    if not config.fields:
        raise UsageError(config.why, "without vLLM, doctor reads config.json: give a folder that has one")
    return config.fields


def with_gpu_block(facts: Facts) -> Facts:
    """Add the block size on a GPU, if this host has no GPU and the planner supports the model."""
    if not facts.hybrid or facts.device.startswith(("cuda", "gpu")) or not facts.config:
        return facts
    try:
        shape = shape_of(facts.config, facts.model, kv_cache_dtype="auto")
    except UsageError:
        return facts
    plan = plan_per_layer(shape, GPU, requested_block(facts))
    return msgspec.structs.replace(facts, gpu_block_tokens=plan.block_tokens)


def with_state_rule(facts: Facts) -> Facts:
    """If the CPU's float32 states raise the block size, add the block size without them, and the flag for it."""
    if not (facts.avx512_bf16 and facts.hybrid and facts.config):
        return facts
    flag_works = keeps_requested_state_dtype(family_of(facts.config))
    model_dtype = facts.dtype if facts.dtype in ("float16", "bfloat16") else "bfloat16"
    requested = requested_block(facts)
    try:
        now = plan_per_layer(shape_from(facts, CPU_BF16), CPU_BF16, requested).block_tokens
        otherwise = plan_per_layer(shape_from(facts, CPU, state_dtype="auto"), CPU, requested).block_tokens
    except UsageError:
        return facts
    if now != facts.block_tokens or otherwise >= now:
        return facts
    flag = f"--mamba-ssm-cache-dtype {model_dtype}" if flag_works else ""
    return msgspec.structs.replace(facts, model_state_block_tokens=otherwise, state_dtype_flag=flag)
