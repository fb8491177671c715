"""vLLM's executor without a model: KV blocks that take no memory.

Base of the executors that `kvtune profile --on sim` and `--on host` run; those make the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from kvtune.data.run.limits import check_blocks
from kvtune.lab.device.blocks import Stage
from kvtune.lab.device.cost import CopyTime
from kvtune.lab.device.tier import DeviceClock, Tier, tier_of
from kvtune.plugin.vllm.types import KVCacheConfig, KVCacheSpec, SchedulerOutput

NOTHING_TO_DO = frozenset(
    ("update_max_model_len", "reset_mm_cache", "reset_encoder_cache", "synchronize_device", "profile")
)
"""Calls of EngineCore to all workers that a worker without a model ignores."""


class ModellessExecutor(Executor):  # type: ignore[misc]
    """Base class. A subclass sets these attributes in `_init_executor`, but the engine's tier of host memory."""

    stages: Sequence[Stage]
    layouts: list[str]
    pool_bytes: int
    clock: DeviceClock
    copy: CopyTime
    tier: Tier | None = None

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
        """Check the pool's size, before vLLM builds its blocks, and make the tier."""
        check_blocks(max((int(config.num_blocks) for config in kv_cache_configs), default=0))
        self.tier = tier_of(self.vllm_config, kv_cache_configs[0], self.clock, self.copy)

    def without_work(self, step: SchedulerOutput, now_s: float) -> ModelRunnerOutput:
        """Return the output of a step that computes nothing: the copies that are done."""
        if self.tier is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput.with_kv_conn_output_only(self.tier.after(step, now_s))

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
