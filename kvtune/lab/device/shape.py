"""Gives vLLM's configuration a GPU engine's shape on any machine.

Runs in the host process, before the engine is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import VllmConfig

from kvtune.lab.device.blocks import pool_bytes
from kvtune.lab.device.kv_specs import apply, blocks_of
from kvtune.lab.device.settings import Timed

if TYPE_CHECKING:
    from kvtune.plugin.vllm import types as vllm_config

EXECUTOR = "kvtune.lab.device.timed.TimedExecutor"


class GpuShaped(VllmConfig):
    """A configuration that vLLM's platform cannot change back.

    EngineCore lets the platform check the configuration once more after the handshake. vLLM's CPU platform would turn
    asynchronous scheduling off, and refuse Model Runner V2, for which the scheduler sends other data.
    """

    @property
    def use_v2_model_runner(self) -> bool:
        return True

    def __post_init__(self) -> None:
        pass


def shape(config: vllm_config.VllmConfig, device: Timed, *, asynchronous: bool = True) -> None:
    """Give `config` a GPU engine's shape, in place; flags keep their values. `asynchronous`: asynchronous scheduling.

    Call it after vLLM's CPU platform has turned asynchronous scheduling off and chosen another executor.
    """
    cache = config.cache_config
    if device.specs:
        apply(device.specs, config, frozenset(name.replace("-", "_") for name in device.given))
        if cache.num_gpu_blocks_override is None:
            cache.num_gpu_blocks_override = blocks_of(device.specs)
    pool_bytes(config)
    config.parallel_config.distributed_executor_backend = EXECUTOR
    config.scheduler_config.async_scheduling = asynchronous
    config.__class__ = GpuShaped
