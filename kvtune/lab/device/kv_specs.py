"""Restores vLLM's KV specs from those captured in a run's header (plain JSON).

Runs in processes of `--on sim` and `--on host`. `plugin/probe/kv_specs.py` captures the specs in a real engine. Only
spec classes of vLLM's kv_cache_interface are instantiated.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from fractions import Fraction
from typing import Any

from kvtune.base.errors import KvtuneError, reason
from kvtune.plugin.probe.kv_specs import CONFIG_FIELDS, VERSION
from kvtune.plugin.vllm.types import KVCacheSpec, VllmConfig

Captured = Mapping[str, Any]
"""The data that `capture` wrote, as read from a file: any value may be missing or of another type."""


OF_LATER_VERSIONS = frozenset({"is_draft", "topk_buffer_width"})
"""Fields of vLLM 0.33's specs that 0.32 does without: it finds a drafter by order; the width is of kernels' buffers."""


def restore(captured: Captured) -> dict[str, KVCacheSpec]:
    """Return each layer's spec by name, from what `capture` wrote. KvtuneError if this vLLM has no such spec."""
    if captured.get("version") != VERSION:
        raise KvtuneError(
            f"the run's KV specs have version {captured.get('version')!r}, this kvtune reads {VERSION}",
            "record the run again with this kvtune",
        )
    try:
        specs = [_spec(encoded) for encoded in captured["specs"]]
        return {name: specs[number] for name, number in captured["layers"].items()}
    except Exception as error:  # vLLM's classes raise many kinds for values that they do not expect
        raise KvtuneError(
            f"the run's KV specs cannot be used with this vLLM: {type(error).__name__}: {reason(error)}",
            "record the run again with this vLLM",
        ) from error


def with_drafter(specs: dict[str, KVCacheSpec], vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Mark the layer of an MTP drafter, by which vLLM 0.33 finds its group. Earlier versions take the last layer."""
    speculative, last = vllm_config.speculative_config, next(reversed(specs), "")
    marked = [getattr(spec, "is_draft", None) for spec in specs.values()]
    if (
        not last
        or speculative is None
        or speculative.method != "mtp"
        or any(marking is not False for marking in marked)
    ):
        return specs
    drafter: Any = specs[last]
    return {**specs, last: replace(drafter, is_draft=True)}


def blocks_of(captured: Captured) -> int:
    """Return the captured pool's number of blocks. KvtuneError if there is none."""
    blocks = captured.get("num_blocks")
    if not isinstance(blocks, int) or blocks < 1:
        raise KvtuneError(
            f"the run's KV specs have no number of blocks: num_blocks is {blocks!a:.40}",
            "record the run again with this kvtune",
        )
    return blocks


def apply(captured: Captured, vllm_config: VllmConfig, given: frozenset[str]) -> None:
    """Set the captured engine's values on a config, except for the fields in `given`, which the user's flags set.

    KvtuneError for a field that `capture` does not write, or a value that it cannot have.
    """
    for section, fields in captured.get("config", {}).items():
        target = getattr(vllm_config, section, None)
        for name, value in fields.items():
            if name not in CONFIG_FIELDS.get(section, ()) or not _is_setting(value):
                raise KvtuneError(
                    f"the run's KV specs set {section}.{name} to {value!a}, which is not taken from a file",
                    "record the run again with this kvtune",
                )
            if name not in given and hasattr(target, name):
                setattr(target, name, value)


def _is_setting(value: object) -> bool:
    """Whether a value is a number, a switch, None or one word: no path, and no name of a class in a module."""
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and value.isidentifier())
    )


def decode(encoded: object) -> object:
    """Decode what `encode` wrote. ValueError for a class that is not one of vLLM's spec classes."""
    import torch

    if not isinstance(encoded, dict):
        return encoded
    if "$dtype" in encoded:
        dtype = vars(torch).get(encoded["$dtype"])  # getattr would import modules that torch loads on demand
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{encoded['$dtype']} is not a dtype")
        return dtype
    if "$tuple" in encoded:
        return tuple(decode(v) for v in encoded["$tuple"])
    if "$fraction" in encoded:
        return _fraction(*encoded["$fraction"])
    if "$multiple" in encoded:
        from vllm.v1.attention.backend import MultipleOf

        return MultipleOf(encoded["$multiple"])
    if "$enum" in encoded:
        return _class(encoded["$enum"], enum.Enum)[encoded["name"]]
    return _spec(encoded)


def _fraction(numerator: object, denominator: object) -> Fraction:
    """Return the fraction of two whole numbers. Fraction itself also takes text, and computes 1e30000000."""
    if not (isinstance(numerator, int) and isinstance(denominator, int)):
        raise ValueError(f"{numerator!a:.40} / {denominator!a:.40} is no fraction of two whole numbers")
    return Fraction(numerator, denominator)


def _spec(encoded: Captured) -> KVCacheSpec:
    from vllm.v1.kv_cache_interface import KVCacheSpec as Base

    spec_class = _class(encoded["$spec"], Base)
    unknown = OF_LATER_VERSIONS - {field.name for field in fields_of(spec_class)}
    fields = {name: decode(value) for name, value in encoded["fields"].items() if name not in unknown}
    spec: KVCacheSpec = spec_class(**fields)
    return spec


def _class(name: str, base: type) -> Any:
    """Return a class of vLLM's kv_cache_interface. ValueError if it has none of this name and kind."""
    from vllm.v1 import kv_cache_interface

    named = getattr(kv_cache_interface, name, None)
    if not (isinstance(named, type) and issubclass(named, base)):
        raise ValueError(f"vLLM has no {'enumeration' if base is enum.Enum else 'KV spec'} {name}")
    return named
