"""Facts that the planner (`kvtune.layout`) works out from a model's config.json, with or without vLLM's answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from kvtune.doctor.facts import Facts, Group
from kvtune.engine.flags import flag_texts
from kvtune.engine.models import builtin, engine_defaults
from kvtune.errors import UsageError
from kvtune.layout.config import (
    Config,
    StateTypes,
    family_of,
    keeps_requested_state_dtype,
    shape_of,
    state_dtype_of,
)
from kvtune.layout.plan import CPU, CPU_BF16, GPU, Backend, BlockPlan, ModelShape, cpu_backend, plan_per_layer
from kvtune.run.cpu import avx512_bf16


def backend_of(facts: Facts) -> Backend:
    """The planner's model of the device."""
    return cpu_backend(bool(facts.avx512_bf16)) if facts.device.startswith("cpu") else GPU


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


def read_config(model: str, engine_args: Sequence[str], device: Literal["", "cpu", "gpu"] = "") -> Facts:
    """Facts planned from config.json alone.

    `device` "": a GPU where `nvidia-smi` is on PATH, else this machine's CPU. `Facts.assumed` says which.
    """
    config = config_of(model)
    device = device or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    flags = {**engine_defaults(model, device), **flag_texts(engine_args)}
    float32 = device == "cpu" and avx512_bf16()
    backend = cpu_backend(float32) if device == "cpu" else GPU
    types: StateTypes = {
        "dtype": flags.get("dtype", "auto"),
        "state_dtype": flags.get("mamba-ssm-cache-dtype", "auto"),
        "float32_states": float32,
    }
    shape = shape_of(config, model, **types)
    requested = flags.get("block-size")
    plan = plan_per_layer(shape, backend, int(requested) if requested and requested.isdigit() else None)
    has = "with AVX-512 BF16, so recurrent states in float32" if float32 else "without AVX-512 BF16"
    assumed = f"this machine's CPU, {has}" if device == "cpu" else "a GPU, states of the config's type"
    text = config.get("text_config") or config
    length = flags.get("max-model-len", "")
    return Facts(
        source="config",
        model=model,
        architecture=", ".join(config.get("architectures", [])),
        device=f"{device} (assumed)",
        dtype=flags.get("dtype") or str(text.get("dtype") or text.get("torch_dtype") or ""),
        avx512_bf16=float32 if device == "cpu" else None,
        assumed=assumed,
        state_dtype=state_dtype_of(config, **types),
        given=flag_texts(engine_args),
        max_model_len=int(length) if length.isdigit() else int(text.get("max_position_embeddings") or 0),
        caching="no-enable-prefix-caching" not in flags,
        block_tokens=plan.block_tokens,
        default_block_tokens=backend.default,
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


def config_of(model: str) -> Config:
    """The config.json of a built-in model or a folder; UsageError for a model that is only on a hub."""
    folder = builtin(model) or Path(model).expanduser()
    path = folder / "config.json"
    if not path.exists():
        raise UsageError(
            f"there is no {path}",
            "without vLLM, doctor reads config.json: give a folder that has one, or install vLLM",
        )
    try:
        loaded: Config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not JSON: {error}", "repair the file") from error
    return loaded


def with_gpu_block(facts: Facts) -> Facts:
    """Add the effective block size on a GPU, where this host has none and the planner supports the model."""
    if not facts.hybrid or facts.device.startswith(("cuda", "gpu")) or not facts.config:
        return facts
    try:
        shape = shape_of(facts.config, facts.model, kv_cache_dtype="auto")
    except UsageError:
        return facts
    plan = plan_per_layer(shape, GPU, requested_block(facts))
    return msgspec.structs.replace(facts, gpu_block_tokens=plan.block_tokens)


def with_state_rule(facts: Facts) -> Facts:
    """Where the CPU's float32 states raise the block size, add the size without them, and the flag that gives it."""
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
