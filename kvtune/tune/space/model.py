"""What depends on the model and the installed engine: legal block sizes, layouts, windows. Imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtune.analysis.knobs import ENGINE_KNOBS
from kvtune.core.compat.names import without_effect
from kvtune.doctor.device import compute_capability
from kvtune.engine.resolve import installed_for, is_cpu_build
from kvtune.errors import KvtuneError
from kvtune.layout.plan import Backend, ModelShape
from kvtune.recipe import Scalar
from kvtune.run.cpu import avx512_bf16

Bundle = tuple[tuple[str, Scalar], ...]
"""Settings that are set together: one value of a searched knob that stands for several (a layout of blocks)."""

STOCK_LAYOUTS = 2


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a model on the installed engine that decide which values are legal. `window` 0: no windows."""

    window: int = 0
    state_layers: int = 0
    alignment: int = 16
    block_tokens: int = 16  # the default, or what `--block-size` asks for
    blocks: tuple[int, ...] = (16, 32, 64, 128)  # worth a trial
    max_model_len: int = 0
    layouts: tuple[Bundle, ...] = ()  # of a model with states: block sizes of stock's layout, and packed ones
    packing_refusal: str = ""  # why blocks cannot be packed
    aside: Mapping[str, str] = field(default_factory=dict)  # knobs that this vLLM does nothing with, and why


def model_facts(
    model: str,
    block_size: int | None,
    longest: int,
    *,
    core: str = "kvtune",
    caching_off: bool = False,
    state_dtype: str = "auto",
    attention: str = "",
    timed: bool = False,
) -> ModelFacts:
    """Read from the model's config.json if it is local; `longest` is the workload's longest request in tokens.

    `state_dtype`: --mamba-ssm-cache-dtype, `attention`: --attention-backend. `timed`: the engine's device only takes
    time (--on host), and without states its blocks are a GPU's on every machine (device/blocks.py).
    """
    from kvtune.layout.choice import kernel_refusal
    from kvtune.layout.plan import gpu_backend, packing_refusal, plan_per_layer, sweep_candidates

    backend = installed_backend(attention)
    config = _config(model)
    if timed and is_cpu_build() and not _has_states(config, model, backend):
        backend = gpu_backend(attention)
    aside = {name: why for name in ENGINE_KNOBS if (why := without_effect(name))}
    if config is None:
        default = block_size or backend.default
        sizes = tuple(backend.alignment << i for i in range(4))
        return ModelFacts(alignment=backend.alignment, block_tokens=default, blocks=sizes, aside=aside)
    try:
        shape = _shape(config, model, backend, state_dtype)
        block = plan_per_layer(shape, backend, block_size).block_tokens
        sizes = tuple(sweep_candidates(shape, backend, max(longest, 2 * block), limit=4))
    except KvtuneError:  # the planner does not know the architecture: vLLM accepts or refuses each trial
        return ModelFacts(
            alignment=backend.alignment, block_tokens=block_size or backend.default, aside=aside
        )
    layouts = _layouts(shape, backend, sizes, longest, caching_off) if core == "kvtune" else ()
    return ModelFacts(
        shape.window,
        shape.state_layers,
        backend.alignment,
        block,
        sizes or (block,),
        longest,
        layouts,
        packing_refusal(shape) or kernel_refusal(shape, backend),
        aside,
    )


def _layouts(
    shape: ModelShape, backend: Backend, sizes: tuple[int, ...], longest: int, caching_off: bool
) -> tuple[Bundle, ...]:
    """Stock's layout at the sizes worth a trial, then packed blocks, smallest first, each about twice the last.

    `caching_off`: the model starts without prefix caching unless it is asked for, and no layout is worth anything then.
    """
    from kvtune.layout.plan import packed_plans

    plans = packed_plans(shape, backend, min(longest, sizes[0] - 1) if sizes else longest)
    if not plans:
        return ()
    caching: Bundle = (("enable_prefix_caching", True),) if caching_off else ()
    # On the CPU, stock crashes on a Mamba-2 model with prefix caching; packed blocks avoid that by themselves.
    whole: Bundle = (
        (("whole_states", True),)
        if backend.name == "cpu" and any(s.name == "ssm" for s in shape.states)
        else ()
    )
    # The smallest one, and others that the longest request could hit.
    stock = [size for size in sizes if size == sizes[0] or size < longest][:STOCK_LAYOUTS]
    layouts: list[Bundle] = [(("block_size", size), *whole, *caching) for size in stock]
    last = 0
    for states, plan in plans.items():
        if plan.block_tokens >= 2 * last:
            layouts.append((("packed", True), ("states_per_block", states), *caching))
            last = plan.block_tokens
    return tuple(layouts)


def installed_backend(attention: str = "") -> Backend:
    """Block sizes of the installed vLLM's platform on this machine. `attention`: --attention-backend."""
    from kvtune.layout.plan import cpu_backend, gpu_backend

    return cpu_backend(avx512_bf16()) if is_cpu_build() else gpu_backend(attention, compute_capability())


def installed_state_dtype(model: str, *, dtype: str | None = None, state_dtype: str | None = None) -> str:
    """The type in which the installed vLLM keeps recurrent states here; empty for a model without, or not local.

    `dtype`, `state_dtype`: --dtype and --mamba-ssm-cache-dtype where they are given.
    """
    from kvtune.engine.models import engine_defaults
    from kvtune.layout.config import state_dtype_of

    config = _config(model)
    if config is None:
        return ""
    try:
        return state_dtype_of(
            config,
            dtype=dtype or engine_defaults(model, installed_for()).get("dtype", "auto"),
            state_dtype=state_dtype or "auto",
            float32_states=installed_backend().float32_states,
        )
    except KvtuneError:
        return ""


def _has_states(config: dict[str, Any] | None, model: str, backend: Backend) -> bool:
    """False also for a model that is not local, or that the planner does not know: most have none."""
    if config is None:
        return False
    try:
        return _shape(config, model, backend, "auto").state_layers > 0
    except KvtuneError:
        return False


def _shape(config: dict[str, Any], model: str, backend: Backend, state_dtype: str) -> ModelShape:
    from kvtune.layout.config import shape_of

    return shape_of(config, model, state_dtype=state_dtype, float32_states=backend.float32_states)


def packed_pool(model: str, blocks: int, block_tokens: int, states: int, *, state_dtype: str = "auto") -> int:
    """As many packed blocks as take the memory of `blocks` blocks of stock's layout at `block_tokens`."""
    from kvtune.layout.plan import least_aggregate_tokens, plan_aggregate, plan_per_layer

    config = _config(model)
    if config is None:
        return blocks
    try:
        backend = installed_backend()
        shape = _shape(config, model, backend, state_dtype)
        stock = plan_per_layer(shape, backend, block_tokens).block_bytes
        packed = plan_aggregate(shape, backend, least_aggregate_tokens(shape, backend, states)).block_bytes
    except KvtuneError:
        return blocks
    return max(2, blocks * stock // packed)


def installed_device() -> str:
    """What the installed vLLM runs on, as its engine calls it."""
    return "cpu" if is_cpu_build() else "cuda"


def _config(model: str) -> dict[str, Any] | None:
    from kvtune.engine.models import builtin

    path = (builtin(model) or Path(model).expanduser()) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
