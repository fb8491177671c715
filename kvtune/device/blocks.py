"""The KV blocks of a device without memory: a model's specs, and how large the pool is. EngineCore and simulator."""

from __future__ import annotations

from kvtune.core.vllm_config import KVCacheSpec, VllmConfig
from kvtune.device.kv_specs import Captured, restore
from kvtune.errors import UsageError

GPU_BLOCK = 16
"""Tokens in a block of an attention-only model on a GPU, unless a flag says otherwise (FlashAttention's default)."""

ENOUGH_BYTES = 1 << 50
"""For any number of blocks that a flag asks for."""


def pool_bytes(config: VllmConfig) -> int:
    """Bytes of the pool, from vLLM's flags. UsageError where they leave it to a device's memory."""
    cache = config.cache_config
    if cache.kv_cache_memory_bytes:
        return int(cache.kv_cache_memory_bytes)
    if cache.num_gpu_blocks_override:
        return ENOUGH_BYTES
    raise UsageError(
        "a device without a model has no memory to measure: how large is its KV cache?",
        "add `-- --num-gpu-blocks-override N` or `-- --kv-cache-memory-bytes N`",
    )


def specs_of(captured: Captured, config: VllmConfig) -> tuple[dict[str, KVCacheSpec], list[str]]:
    """Layer name -> spec, and KV layouts (none where a captured configuration names one)."""
    from vllm.platforms import current_platform

    from kvtune.device.meta_model import specs_of_model

    if captured:
        return restore(captured), []
    cache = config.cache_config
    wanted = int(cache.block_size) if cache.user_specified_block_size else GPU_BLOCK
    specs, layouts = specs_of_model(config)
    if current_platform.is_cpu():
        _resize(config, specs, wanted)
    return specs, layouts


def _resize(config: VllmConfig, specs: dict[str, KVCacheSpec], wanted: int) -> None:
    """Undo what a CPU's attention kernels chose. Blocks of models with states follow from these, and stay."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    now = int(config.cache_config.block_size)
    if wanted == now or not all(isinstance(spec, AttentionSpec) for spec in specs.values()):
        return
    config.cache_config.block_size = wanted
    for name, spec in specs.items():
        specs[name] = spec.copy_with_new_block_size(spec.block_size * wanted // now)
