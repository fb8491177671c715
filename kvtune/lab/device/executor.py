"""vLLM's executor without a model: KV blocks that take no memory.

Base of the executors that `kvtune profile --on sim` and `--on host` run; those make the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.v1.executor.abstract import Executor

from kvtune.data.run.limits import check_blocks
from kvtune.lab.device.blocks import Stage
from kvtune.plugin.vllm.types import KVCacheConfig, KVCacheSpec

NOTHING_TO_DO = frozenset(
    ("update_max_model_len", "reset_mm_cache", "reset_encoder_cache", "synchronize_device", "profile")
)
"""Calls of EngineCore to all workers that a worker without a model ignores."""


class ModellessExecutor(Executor):  # type: ignore[misc]
    """Base class. A subclass sets the three attributes in `_init_executor`."""

    stages: Sequence[Stage]
    layouts: list[str]
    pool_bytes: int

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [dict(stage.specs) for stage in self.stages]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [self.layouts for _ in self.stages]

    def determine_available_memory(self) -> list[int]:
        """Return each stage's; `pool_bytes` is the heaviest's."""
        return [self.pool_bytes + stage.spare_bytes for stage in self.stages]

    def set_kv_cache_layout(self, layout_name: str, *more: int) -> None:
        """Do nothing. `more`: from vLLM 0.33 on, how context-parallel ranks share a cache."""

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Check the pool's size, before vLLM builds its blocks."""
        check_blocks(max((int(config.num_blocks) for config in kv_cache_configs), default=0))

    def get_kv_connector_handshake_metadata(self) -> list[object]:
        """Return an empty list: a host-memory tier needs no handshake."""
        return []

    def compile_or_warm_up_model(self) -> None:
        pass

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def collective_rpc(
        self,
        method: str | Callable[..., object],
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
        non_block: bool = False,
    ) -> list[None]:
        if method in NOTHING_TO_DO:
            return [None]
        raise NotImplementedError(f"a worker without a model has no {method}")
