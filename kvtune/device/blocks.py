"""How large the pool of a device without memory is. EngineCore and simulator."""

from __future__ import annotations

from kvtune.core.vllm_config import VllmConfig
from kvtune.errors import UsageError

NO_POOL = (
    "a device without a model has no memory to measure: how large is its KV cache?",
    "add `-- --num-gpu-blocks-override N` or `-- --kv-cache-memory-bytes N`, or --like RUN for a recorded engine's",
)

ENOUGH_BYTES = 1 << 50
"""For any number of blocks that a flag asks for."""


def pool_bytes(config: VllmConfig) -> int:
    """Bytes of the pool, from vLLM's flags. UsageError where they leave it to a device's memory."""
    cache = config.cache_config
    if cache.kv_cache_memory_bytes:
        return int(cache.kv_cache_memory_bytes)
    if cache.num_gpu_blocks_override:
        return ENOUGH_BYTES
    raise UsageError(*NO_POOL)
