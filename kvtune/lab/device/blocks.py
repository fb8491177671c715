"""What each rank of a pipeline holds of a model, and the size of the KV cache pool of an engine without one.

Runs in EngineCore and in the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtune.base.errors import UsageError
from kvtune.base.units import size
from kvtune.data.platforms import GIB
from kvtune.plugin.vllm.types import KVCacheSpec, VllmConfig

NO_POOL = (
    "a device without a model has no memory to measure: how large is its KV cache?",
    "add --like-device 80GiB (or h100, ..) for what vLLM leaves for it on such a device; or `-- "
    "--kv-cache-memory-bytes N`, `-- --num-gpu-blocks-override N`, or --like RUN for a recorded engine's",
)

ENOUGH_BYTES = 1 << 50
"""A memory size with room for any number of blocks that a flag asks for."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of one pipeline rank, their specs by name; of a model without a pipeline all.

    `weight_bytes`: of one tensor-parallel rank. `spare_bytes`: memory for its pool beyond the heaviest stage's.
    """

    specs: dict[str, KVCacheSpec]
    weight_bytes: int = 0
    spare_bytes: int = 0


def layers_of(stages: Sequence[Stage]) -> dict[str, KVCacheSpec]:
    """Return the specs of all stages, first to last."""
    return {name: spec for stage in stages for name, spec in stage.specs.items()}


def give_pool(config: VllmConfig, memory_bytes: int, stages: Sequence[Stage]) -> list[Stage]:
    """Set the pool's size, if no flag does, to the memory that vLLM would leave beside a rank's weights.

    The heaviest stage's memory is the setting's; the stages that are returned have what more they have.
    vLLM also keeps room for a step's activations, which only a real engine measures. UsageError if nothing is left.
    """
    cache, parallel = config.cache_config, config.parallel_config
    if cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override:
        return list(stages)
    weights = max(stage.weight_bytes for stage in stages)
    room = int(memory_bytes * cache.gpu_memory_utilization)
    if room <= weights:
        ranks = 2 * parallel.tensor_parallel_size
        while weights * parallel.tensor_parallel_size // ranks >= room:
            ranks *= 2
        least = int(weights / cache.gpu_memory_utilization / GIB) + 1
        raise UsageError(
            f"the weights take {size(weights)}, and vLLM uses {size(room)} of a device of {size(memory_bytes)}: no KV "
            "cache fits",
            f"name a larger device, --like-device {least}GiB or more; or spread the model: "
            f"`-- --tensor-parallel-size {ranks}`",
        )
    cache.kv_cache_memory_bytes = room - weights
    return [replace(stage, spare_bytes=weights - stage.weight_bytes) for stage in stages]


def pool_bytes(config: VllmConfig) -> int:
    """Return the bytes of the pool, from vLLM's flags. UsageError if no flag sets the pool's size."""
    cache = config.cache_config
    if cache.kv_cache_memory_bytes:
        return int(cache.kv_cache_memory_bytes)
    if cache.num_gpu_blocks_override:
        return ENOUGH_BYTES
    raise UsageError(*NO_POOL)
