"""The knobs that can be searched, of the core and of vLLM, and their legal values.

`GROUPS` are the flags of `kvtune sweep` (--pin, --block-size, ..).
Imports no vLLM.
"""

from __future__ import annotations

import math

from kvtune.analysis.knobs import API_SERVERS, ENGINE_KNOBS
from kvtune.core.settings import KNOBS
from kvtune.errors import UsageError, did_you_mean
from kvtune.recipe import TIER_POLICIES, Scalar
from kvtune.tune.space.model import Bundle, ModelFacts

ALIASES = {
    "retention": "prefix_cache_retention_interval",
    "chunk": "max_num_batched_tokens",
    "gc_freeze": "freeze",
}

LAYOUT = "layout"
"""The knob of a model with recurrent states whose values are block layouts: stock's at some size, or packed."""

GROUPS = {
    "pin": ("pin_window", "slack", "policy"),
    "min_drop": ("min_drop",),
    "block_size": ("block_size",),
    "retention": ("prefix_cache_retention_interval",),
    "chunk": ("max_num_batched_tokens",),
    "gc": ("freeze", "gc_threshold0", "collect_at_wait"),
}


TIER = ("kv_offloading_size", "eviction_policy", "blocks_per_chunk", "store_threshold")
"""Knobs of a tier of host memory. The first one switches the tier on."""

DEFAULTS: dict[str, Scalar] = {
    "prefill_schedule_interval": 1,
    "eviction_policy": "lru",
    "blocks_per_chunk": 1,
    "store_threshold": 0,
}
"""Defaults of knobs that some versions of vLLM ignore."""

COLLECTOR = ("freeze", "gc_threshold0", "gc_threshold1", "gc_threshold2", "collect_at_wait")
FRONT_END = ("stream_interval", API_SERVERS)
ENGINE_ONLY = (*COLLECTOR, *FRONT_END)
"""Knobs of the garbage collector and the front end. A simulation has neither, so they change nothing there."""


def candidates(name: str, facts: ModelFacts) -> tuple[Scalar | Bundle, ...]:
    """Return the values of a knob that are worth a trial for this model."""
    if name == LAYOUT:
        return facts.layouts
    window = facts.window or 512
    chosen: dict[str, tuple[Scalar, ...]] = {
        "pin_window": (0, 2 * window, 4 * window) if facts.window else (0,),
        "slack": (0, 128, 512, 2048) if facts.window else (0,),
        "policy": ("first", "two_class", "chat") if facts.window else ("lru", "two_class"),
        "min_drop": (1, 16, 64) if facts.window else (16,),
        "windows": (0, 2, 4, 8),
        "reuse_bonus_s": (30.0, 100.0, 300.0, 1e9),
        "ghost_factor": (1.0, 4.0, 8.0),
        "gc_threshold0": (0, 20_000, 100_000),
        "block_size": facts.blocks,
        # With recurrent states: a unit that divides every layout's block (the alignment); retention of all or none.
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
        "max_num_batched_tokens": _with((1024, 2048, 4096, 8192), facts.batched_tokens),
        "max_num_seqs": _with((32, 128, 256), facts.sequences),
        "kv_offloading_size": (0.0, 1.0, 2.0, 4.0, 8.0),
        "eviction_policy": TIER_POLICIES,
        "blocks_per_chunk": (1, 2, 4),
        "store_threshold": (0, 2),
        "stream_interval": (1, 4, 16),
        API_SERVERS: (1, 2, 4),
        "prefill_schedule_interval": (1, 2, 4, 8),
    }
    if name in facts.aside:
        return (DEFAULTS[name],)
    if name in chosen:
        # For an unknown model, add the core's default to the values for plain models.
        return _with(chosen[name], KNOBS[name].default) if facts.unknown and name in KNOBS else chosen[name]
    knob = KNOBS[name]
    return (True, False) if knob.kind == "switch" else knob.choices or (knob.default,)


def _with(values: tuple[Scalar, ...], served: Scalar) -> tuple[Scalar, ...]:
    """Return the values with the default `served` among them."""
    return values if served in values else (*values, served)


def canonical(text: str) -> str:
    """Return the knob's name from a text with `core.`, dashes or a short name. UsageError lists the knobs."""
    name = text.strip().removeprefix("core.").removeprefix("engine.").replace("-", "_")
    name = ALIASES.get(name, name)
    if name in KNOBS or name in ENGINE_KNOBS:
        return name
    known = (*KNOBS, *ENGINE_KNOBS)
    mean = did_you_mean(name, known)
    raise UsageError(f"--set {text}: there is no knob {name!r}", f"{mean}knobs: {', '.join(known)}")


def front_end_knobs(text: str) -> tuple[str, ...]:
    """Return the front-end knobs that `--knobs NAME,NAME` names, or () for an empty text."""
    names = tuple(dict.fromkeys(canonical(each) for each in text.split(","))) if text.strip() else ()
    for name in names:
        if name not in FRONT_END:
            raise UsageError(
                f"--knobs {name} is no knob of the front end", f"it takes {', '.join(FRONT_END)}"
            )
    return names


def read_value(name: str, text: object, facts: ModelFacts) -> Scalar:
    """Return the value in the knob's type. UsageError says which values are legal for this model."""
    if name in KNOBS:
        value = KNOBS[name].read(text)
        _refuse_packing(name, value, facts)
        return value
    nullable = ("prefix_cache_retention_interval", "prefix_match_unit")
    if name in nullable and str(text).strip().lower() == "none":
        return "none"
    if name == "enable_prefix_caching":
        return KNOBS["packed"].read(text)
    if name == "kv_offloading_size":
        return _gib(text)
    if name in facts.aside and str(text).strip() != str(DEFAULTS[name]):
        raise UsageError(f"{name}={text} has no effect here: {facts.aside[name]}", f"leave {name} out")
    if name == "eviction_policy":
        policy = str(text).strip().lower()
        if policy not in TIER_POLICIES:
            raise UsageError(f"{name}={text} is not legal", f"{name} takes {', '.join(TIER_POLICIES)}")
        return policy
    try:
        number = int(str(text))
    except ValueError:
        number = -1
    least, step, what = _legal(name, facts)
    if number < least or number % step:
        raise UsageError(f"{name}={text} is not legal", f"{name} takes {what}")
    return number


def _gib(text: object) -> float:
    try:
        gib = float(str(text))
    except ValueError:
        gib = math.nan
    if not 0 <= gib < math.inf:
        raise UsageError(
            f"kv_offloading_size={text} is not legal",
            "kv_offloading_size takes a number of GiB, e.g. 0.5; 0 is no host memory",
        )
    return gib


def _states_worth_a_trial(facts: ModelFacts) -> tuple[Scalar, ...]:
    named = [value for layout in facts.layouts for name, value in layout if name == "states_per_block"]
    return tuple(named) or (1,)


def _refuse_packing(name: str, value: Scalar, facts: ModelFacts) -> None:
    if name == "packed" and value and facts.packing_refusal:
        raise UsageError(f"packed=true is not legal: {facts.packing_refusal}", "leave packed out")
    if name == "states_per_block" and 0 < facts.state_layers < int(value):
        raise UsageError(
            f"states_per_block={value} is not legal",
            f"states_per_block takes 1 to {facts.state_layers}: the model has {facts.state_layers} state layers",
        )


def _legal(name: str, facts: ModelFacts) -> tuple[int, int, str]:
    """Return the smallest legal value, the step between legal values, and both in words."""
    a = facts.alignment
    if name == "block_size":
        sizes = f"; worth a trial here: {', '.join(map(str, facts.blocks))}"
        return a, a, f"multiples of {a} tokens (this machine's attention kernels){sizes}"
    if name == "prefix_match_unit":
        return 1, 1, f"none, or a divisor of the block size ({facts.block_tokens} tokens), e.g. {a}"
    if name == "prefix_cache_retention_interval":
        return 0, 1, "none, 0, or a multiple of the block size in tokens"
    if name == "max_num_batched_tokens":
        return 16, 1, "a whole number of tokens from 16 up"
    if name == "store_threshold":
        return 0, 1, "a whole number from 0 up"
    return 1, 1, "a whole number from 1 up"
