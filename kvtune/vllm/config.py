"""vLLM's own types of its configuration, KV cache specs and attention backends, by name, for annotations.

mypy reads them from the installed vLLM; importing this module imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig as Transfer
    from vllm.config import ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout as Layout

    Backend = type[AttentionBackend]
    KVCacheGroup = KVCacheGroupSpec

    class HybridPlatform(Protocol):
        """The class of a platform that sizes the blocks of models with states."""

        def _find_non_ssm_backends(self, vllm_config: VllmConfig) -> Sequence[Backend]: ...

else:

    def __getattr__(name: str) -> object:
        return object


__all__ = [
    "Backend",
    "HybridPlatform",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "Layout",
    "ModelConfig",
    "MultipleOf",
    "SchedulerConfig",
    "Transfer",
    "VllmConfig",
]
