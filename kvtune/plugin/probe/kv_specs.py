"""Writes the KV cache specs of a running engine as JSON data, for the simulator to rebuild. EngineCore, once.

The JSON names classes of vLLM's kv_cache_interface and holds no code; kvtune/lab/device/kv_specs.py reads it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

from kvtune.data.knobs import config_fields
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, VllmConfig

VERSION = 1

Layers = Sequence[Mapping[str, KVCacheSpec]]
"""Each worker's specs, by layer."""

# The settings that decide scheduling and caching, by section of VllmConfig. The simulator uses their captured values,
# and ignores all other settings in a file.
CONFIG_FIELDS: dict[str, tuple[str, ...]] = {
    "model_config": ("max_model_len",),
    "cache_config": (
        "block_size",
        *config_fields("cache", replayed=True),
        "kv_cache_layout",
    ),
    "scheduler_config": (
        "async_scheduling",
        *config_fields("scheduler", replayed=True),
        "max_num_scheduled_tokens",
        "max_num_active_seqs",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "watermark",
        "policy",
    ),
}


def capture(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, workers: Layers = ()
) -> dict[str, object]:
    """Return the KV cache specs of a running engine, for the simulator. Call it after EngineCore is built.

    `workers`: each worker's specs by layer, as EngineCore asked for them (`told`). A replay groups these as EngineCore
    did. The scheduler's configuration has one spec a group, which stands for layers with pages of several sizes.
    """
    layers = {name: spec for worker in workers for name, spec in worker.items()}
    if not layers.keys() >= {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}:
        layers = of_groups(kv_cache_config)
    specs: list[object] = []  # layers share a few specs: each is written once
    spec_of_layer = {}
    for name, spec in layers.items():
        encoded = encode(spec)
        if encoded not in specs:
            specs.append(encoded)
        spec_of_layer[name] = specs.index(encoded)
    config = {
        section: {
            f: _plain(getattr(getattr(vllm_config, section), f))
            for f in fields
            if hasattr(getattr(vllm_config, section, None), f)
        }
        for section, fields in CONFIG_FIELDS.items()
    }
    return {
        "version": VERSION,
        "num_blocks": int(kv_cache_config.num_blocks),
        "specs": specs,
        "layers": spec_of_layer,
        "groups": [list(g.layer_names) for g in kv_cache_config.kv_cache_groups],
        "config": config,
    }


def of_groups(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Return each layer's spec as the scheduler knows it: the one spec of its group."""
    layers: dict[str, KVCacheSpec] = {}
    # A drafter's group comes last: vLLM takes the last layer's group for it, as MTP's layers have no other mark.
    groups = sorted(kv_cache_config.kv_cache_groups, key=lambda g: bool(getattr(g, "is_eagle_group", False)))
    for group in groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            layers[name] = inner[name] if inner is not None else group.kv_cache_spec
    return layers


def of_group(group: KVCacheGroupSpec, layers: Mapping[str, KVCacheSpec]) -> list[KVCacheSpec]:
    """Return the spec of each of a group's layers. `layers`: each layer's own spec, as its worker told it, if known.

    The scheduler's group has one layer's spec, in which vLLM fits the pool's pages; it stands for layers with pages of
    several sizes, whose own specs these are.
    """
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None) or {}
    return [inner.get(name) or _own(layers.get(name), spec) for name in group.layer_names]


def used_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a page that hold keys and values, or a state."""
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))


def _own(own: KVCacheSpec | None, of_all: KVCacheSpec) -> KVCacheSpec:
    if own is None or own.block_size != of_all.block_size or used_bytes(own) == used_bytes(of_all):
        return of_all
    return own


def watch_workers(part: str, tell: Callable[[Layers], None]) -> None:
    """Call `tell` with each worker's specs by layer when EngineCore asks its workers for them."""
    from vllm.v1.engine.core import EngineCore

    def wrap(initialize: Callable[..., object]) -> Callable[..., object]:
        def initialized(engine: Any, *args: object, **options: object) -> object:
            executor = engine.model_executor
            ask = executor.get_kv_cache_specs

            def asked() -> Layers:
                specs: Layers = ask()
                with suppress(Exception):  # the scheduler's view does, if need be
                    tell([dict(worker) for worker in specs])
                return specs

            with suppress(AttributeError):
                executor.get_kv_cache_specs = asked
            try:
                return initialize(engine, *args, **options)
            finally:
                executor.__dict__.pop("get_kv_cache_specs", None)

        return initialized

    STATE.patches.wrap(part, EngineCore, "_initialize_kv_caches", wrap)


def encode(value: object) -> object:
    """Return a spec, or a field of one, as JSON data. A type that JSON lacks becomes an object with a key `$..`."""
    import torch

    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, enum.Enum):
        return {"$enum": type(value).__name__, "name": value.name}
    if isinstance(value, int | float):
        return value
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Fraction):
        return {"$fraction": [value.numerator, value.denominator]}
    if isinstance(value, tuple | list):
        return {"$tuple": [encode(v) for v in value]}
    # A MultipleOf is a dataclass, too.
    if type(value).__name__ == "MultipleOf" and hasattr(value, "base"):
        return {"$multiple": int(value.base)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"$spec": type(value).__name__, "fields": fields}
    raise TypeError(f"a KV spec holds a {type(value).__name__}")


def _plain(value: object) -> bool | int | float | str | None:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
