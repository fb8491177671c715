"""From captured KV specs (plain JSON in a run's header) back to vLLM's. Simulator's process only.

kvtune/probe/kv_specs.py writes them in a real engine. Only spec classes of vLLM's kv_cache_interface are ever made.
"""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import Any

from kvtune.errors import KvtuneError
from kvtune.probe.kv_specs import VERSION


def restore(captured: dict[str, Any]) -> dict[str, Any]:
    """Layer name -> vLLM spec, from what `capture` wrote. KvtuneError when this vLLM does not know it."""
    if captured.get("version") != VERSION:
        raise KvtuneError(
            f"the run's KV specs have version {captured.get('version')!r}, this kvtune reads {VERSION}",
            "record the run again with this kvtune",
        )
    try:
        kinds = [decode(said) for said in captured["specs"]]
        return {name: kinds[number] for name, number in captured["layers"].items()}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise KvtuneError(
            f"the run's KV specs cannot be used with this vLLM: {error}",
            "record the run again with this vLLM",
        ) from error


def apply(captured: dict[str, Any], vllm_config: Any, given: frozenset[str]) -> None:
    """Set the captured engine's values on a config; fields named in `given` were chosen by the person and stay."""
    for section, fields in captured.get("config", {}).items():
        target = getattr(vllm_config, section, None)
        for name, value in fields.items():
            if name not in given and hasattr(target, name):
                setattr(target, name, value)


def decode(said: Any) -> Any:
    """The inverse of `encode`. ValueError for a class that is none of vLLM's spec classes."""
    import torch

    if not isinstance(said, dict):
        return said
    if "$dtype" in said:
        found = getattr(torch, said["$dtype"])
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{said['$dtype']} is no dtype")
        return found
    if "$tuple" in said:
        return tuple(decode(v) for v in said["$tuple"])
    if "$fraction" in said:
        return Fraction(*said["$fraction"])
    if "$multiple" in said:
        from vllm.v1.attention.backend import MultipleOf

        return MultipleOf(said["$multiple"])
    if "$enum" in said:
        return _enum(said["$enum"])[said["name"]]
    return _spec_class(said["$spec"])(**{name: decode(v) for name, v in said["fields"].items()})


def _spec_class(name: str) -> Any:
    from vllm.v1 import kv_cache_interface

    found = getattr(kv_cache_interface, name, None)
    if not (isinstance(found, type) and issubclass(found, kv_cache_interface.KVCacheSpec)):
        raise ValueError(f"vLLM has no KV spec {name}")
    return found


def _enum(name: str) -> Any:
    from vllm.v1 import kv_cache_interface

    found = getattr(kv_cache_interface, name, None)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise ValueError(f"vLLM's specs have no enumeration {name}")
    return found
