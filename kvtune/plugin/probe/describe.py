"""Describes EngineCore's KV cache as plain data: groups, block sizes, pool. Runs in EngineCore, once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvtune.plugin.probe.kv_specs import Layers, capture, of_group
from kvtune.plugin.probe.offload import tier_facts
from kvtune.plugin.probe.status import CacheFacts
from kvtune.plugin.vllm.names import hashing
from kvtune.plugin.vllm.types import Scheduler, VllmConfig, has_tier


def describe_cache(scheduler: Scheduler, workers: Layers = ()) -> CacheFacts:
    """Return a scheduler's block counts and KV cache groups, and the specs from which the simulator rebuilds them.

    `workers`: each worker's specs by layer, if they are known.
    """
    config, pool = scheduler.kv_cache_config, scheduler.kv_cache_manager.block_pool
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    groups = []
    layers = {name: spec for worker in workers for name, spec in worker.items()}
    for group, manager in zip(config.kv_cache_groups, managers, strict=True):
        spec = group.kv_cache_spec
        groups.append(
            {
                "kind": type(spec).__name__,
                "block_size": int(manager.block_size),
                "sliding_window": getattr(spec, "sliding_window", None),
                "layers": len(group.layer_names),
                "page_bytes": int(spec.page_size_bytes),
                "block_bytes": sum(int(spec.page_size_bytes) for spec in of_group(group, layers)),
            }
        )
        with suppress(Exception):  # optional: a failure must not cost the other facts
            if name := _backend(scheduler.vllm_config, group.layer_names):
                groups[-1]["backend"] = name
    policy = getattr(getattr(pool, "free_block_queue", None), "policy", None)
    hashed = hashing(scheduler)
    facts: CacheFacts = {
        "num_blocks": int(config.num_blocks),
        "hash_block_size": hashed["hash_block_size"],
        "hit_alignment_tokens": hashed["hit_alignment_tokens"],
        "retention_interval": hashed["retention_interval"],
        "groups": groups,
        "scheduler": type(scheduler).__name__,
        "pool": type(pool).__name__,
        "policy": str(getattr(policy, "name", "")),  # "": vLLM's own queue
        "prefix_caching": bool(scheduler.kv_cache_manager.enable_caching),
    }
    if has_tier(scheduler.connector):
        facts["offload"] = tier_facts(scheduler.connector, scheduler.vllm_config)
    try:
        facts["kv_specs"] = capture(scheduler.vllm_config, config, workers)
    except Exception as error:
        facts["kv_specs_failed"] = f"{type(error).__name__}: {error}"
    return facts


def _backend(config: VllmConfig, layers: Sequence[str]) -> str:
    """Return the attention backend of a group's layers; "" if another process has the layers (several GPUs)."""
    layer = config.compilation_config.static_forward_context.get(layers[0]) if layers else None
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else ""
