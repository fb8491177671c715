"""vLLM's offloading to host memory with kvtune's cache policy: the policy also says what is stored. EngineCore."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import LoadStoreSpec, LookupResult, OffloadingManager, PrepareStoreOutput
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvtune.core import state
from kvtune.core.offload import install
from kvtune.core.offload.policy import ReusePolicy
from kvtune.core.offload.windows import Windows


class ReuseManager(CPUOffloadingManager):  # type: ignore[misc]
    """vLLM's manager, which stores what the policy admits of an offer."""

    _policy: ReusePolicy

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        return super().prepare_store(self._policy.admit(list(keys), req_context), req_context)

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> LoadStoreSpec:
        self._policy.loads(keys, req_context)
        return super().prepare_load(keys, req_context)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        result = super().lookup(key, req_context)
        self._policy.looked_up(key, result is not LookupResult.MISS, req_context)
        return result

    def keep_windows(self, windows: Windows) -> None:
        """From now on every window is offered, and the policy knows which are needed."""
        self._policy.windows = windows


class ReuseOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec for host memory, with this manager where the policy is kvtune's."""

    _manager: OffloadingManager | None

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if self.eviction_policy == ReusePolicy.__name__:
            install.offer_windows()

    def get_manager(self) -> OffloadingManager:
        if self._manager is None and self.eviction_policy == ReusePolicy.__name__:
            # For /metrics, from vLLM 0.33 on.
            facts = {"info": self.cpu_info} if hasattr(self, "cpu_info") else {}
            manager = self._manager = ReuseManager(
                num_chunks=self.num_chunks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=int(self.extra_config.get("store_threshold", 0)),
                max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
                **facts,
            )
            state.gauge(manager._policy.counters)
        return super().get_manager()
