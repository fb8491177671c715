"""Facts of the model and the installed engine: legal block sizes, layouts, windows. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtune.base.errors import KvtuneError
from kvtune.data.flags import SPECULATION, flag_texts, flag_value
from kvtune.data.knobs import ENGINE, Bundle, ModelFacts
from kvtune.data.layout.model_config import model_config
from kvtune.data.layout.plan import Backend, ModelShape, backend_of
from kvtune.data.platforms import Platform, defaults
from kvtune.lab.setup.platform import here
from kvtune.lab.setup.resolve import installed_for, is_cpu_build, ranks, tensor_parallel
from kvtune.plugin.vllm.names import without_effect

STOCK_LAYOUTS = 2


def model_facts(
    model: str,
    block_size: int | None,
    longest: int,
    *,
    core: str = "kvtune",
    caching_off: bool = False,
    platform: Platform | None = None,
    engine_args: Sequence[str] = (),
) -> ModelFacts:
    """Return the facts, from the model's config.json. `longest`: the workload's longest request in tokens.

    `caching_off`: the model starts without prefix caching. `platform`: the engines' machine (default: this one).
    """
    from kvtune.answers.doctor.packing import kernel_refusal
    from kvtune.data.layout.config import shape_of
    from kvtune.data.layout.plan import packing_refusal, plan_per_layer, sweep_candidates

    platform = platform or here()
    backend = backend_of(platform, flag_value(engine_args, "attention-backend") or "")
    served, flags = defaults(platform, ranks(engine_args)), flag_texts(engine_args)
    facts = ModelFacts(
        alignment=backend.alignment,
        block_tokens=block_size or backend.default,
        ignored={name: why for name in ENGINE if (why := without_effect(name))},
        batched_tokens=int(served["max_num_batched_tokens"].value),
        sequences=int(served["max_num_seqs"].value),
        caching="no-enable-prefix-caching" not in flags and not caching_off,
        drafts=SPECULATION in flags,
    )
    config = model_config(model, flag_value(engine_args, "revision"))
    if not config.fields:
        sizes = tuple(backend.alignment << i for i in range(4))
        return replace(facts, blocks=tuple(sorted({*sizes, facts.block_tokens})), unknown=config.why)
    try:
        shape = shape_of(
            config.fields,
            model,
            state_dtype=flag_value(engine_args, "mamba-ssm-cache-dtype") or "auto",
            float32_states=platform.float32_states,
            tensor_parallel=tensor_parallel(engine_args),
        )
        block = plan_per_layer(shape, backend, block_size).block_tokens
        sizes = tuple(sweep_candidates(shape, backend, max(longest, 2 * block), limit=4))
    except (
        KvtuneError
    ) as error:  # the planner does not know the architecture: vLLM accepts or refuses each trial
        return replace(facts, unknown=error.message)
    return replace(
        facts,
        window=shape.window,
        state_layers=shape.state_layers,
        block_tokens=block,
        blocks=sizes or (block,),
        max_model_len=longest,
        layouts=_layouts(shape, backend, sizes, longest, caching_off) if core == "kvtune" else (),
        packing_refusal=packing_refusal(shape) or kernel_refusal(shape, backend),
    )


def _layouts(
    shape: ModelShape, backend: Backend, sizes: tuple[int, ...], longest: int, caching_off: bool
) -> tuple[Bundle, ...]:
    """Return stock's layout at sizes worth a trial, then packed blocks, each at least twice as large as the last.

    `caching_off`: the model starts without prefix caching, so each layout must turn it on.
    """
    from kvtune.data.layout.plan import packed_plans

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
    # The smallest size, and others below the longest request, which can hit with them.
    stock = [size for size in sizes if size == sizes[0] or size < longest][:STOCK_LAYOUTS]
    layouts: list[Bundle] = [(("block_size", size), *whole, *caching) for size in stock]
    last = 0
    for states, plan in plans.items():
        if plan.block_tokens >= 2 * last:
            layouts.append((("packed", True), ("states_per_block", states), *caching))
            last = plan.block_tokens
    return tuple(layouts)


def installed_state_dtype(model: str, engine_args: Sequence[str]) -> str:
    """Return the dtype of recurrent states in the installed vLLM; "" without states, or for an unknown model."""
    from kvtune.data.layout.config import state_dtype_of
    from kvtune.data.layout.models import engine_defaults

    config = model_config(model).fields
    if not config:
        return ""
    try:
        return state_dtype_of(
            config,
            dtype=flag_value(engine_args, "dtype")
            or engine_defaults(model, installed_for()).get("dtype", "auto"),
            state_dtype=flag_value(engine_args, "mamba-ssm-cache-dtype") or "auto",
            float32_states=here().float32_states,
        )
    except KvtuneError:
        return ""


def installed_device() -> str:
    """Return the device of the installed vLLM: `cpu` or `cuda`."""
    return "cpu" if is_cpu_build() else "cuda"
