"""The symbols of vLLM that each part of the core replaces, wraps or relies on. Data only.

`PARTS` lists the parts; whether one can load depends only on its symbols. `needs`: symbols whose parameters and code
must be known. `calls`: symbols that a part only follows or calls, and that must exist.
docs/internals.md lists what is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Modules = dict[str, tuple[str, ...]]
"""Names of functions, methods and classes, by the module that defines them."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function, method or class of vLLM. `whole`: its code must be known, not only its name."""

    module: str
    name: str
    whole: bool = True

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the core, which loads as a whole or not at all."""

    needs: tuple[Modules, ...]
    calls: tuple[Modules, ...] = ()

    def symbols(self) -> Iterator[Symbol]:
        for whole, tables in ((True, self.needs), (False, self.calls)):
            for table in tables:
                for module, names in table.items():
                    yield from (Symbol(module, name, whole) for name in names)


MOVED: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.kv_cache_utils._get_packed_kv_cache_groups": ("vllm.v1.core.kv_cache_planning",),
    "vllm.v1.core.kv_cache_utils.get_kv_cache_config_from_groups": ("vllm.v1.core.kv_cache_planning",),
}
"""Symbols that some versions of vLLM define in another module than the one named below."""

_BLOCK_POOL: Modules = {
    "vllm.v1.core.block_pool": (
        "BlockHashToBlockMap.__init__",
        "BlockHashToBlockMap.get_one_block",
        "BlockHashToBlockMap.insert",
        "BlockPool.__init__",
        "BlockPool.cache_full_blocks",
        "BlockPool._insert_block_hash",
        "BlockPool._remove_cached_block_hashes",
        "BlockPool._maybe_evict_cached_block",
        "BlockPool.get_new_blocks",
        "BlockPool.unpin_blocks",
        "BlockPool.touch",
        "BlockPool.free_blocks",
        "BlockPool.evict_blocks",
        "BlockPool.reset_prefix_cache",
        "BlockPool.get_num_free_blocks",
    ),
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock", "FreeKVCacheBlockQueue"),
}
_FREEING: Modules = {
    "vllm.v1.core.single_type_kv_cache_manager": (
        "SingleTypeKVCacheManager.__init__",
        "SingleTypeKVCacheManager.add_local_computed_blocks",
        "SingleTypeKVCacheManager.allocate_new_blocks",
        "SingleTypeKVCacheManager.pop_blocks_for_free",
        "SingleTypeKVCacheManager.free",
        "SingleTypeKVCacheManager._remove_blocks_in_range",
    ),
    "vllm.v1.core.kv_cache_coordinator": (
        "KVCacheCoordinator.__init__",
        "KVCacheCoordinator.free",
        "KVCacheCoordinator.pop_blocks_for_free",
    ),
    "vllm.v1.core.kv_cache_manager": (
        "KVCacheManager.__init__",
        "KVCacheManager.free",
        "KVCacheManager.pop_blocks_for_free",
    ),
}
_WINDOWS: Modules = {
    "vllm.v1.core.single_type_kv_cache_manager": (
        "SingleTypeKVCacheManager.cache_blocks",
        "SingleTypeKVCacheManager.remove_skipped_blocks",
        "SlidingWindowManager",
        "FullAttentionManager.find_longest_cache_hit",
    ),
    "vllm.v1.core.kv_cache_coordinator": (
        "replay_boundaries",
        "KVCacheCoordinator.cache_blocks",
        "KVCacheCoordinator.remove_skipped_blocks",
        "HybridKVCacheCoordinator.get_num_cacheable_tokens",
        "HybridKVCacheCoordinator.find_longest_cache_hit",
        "UnitaryKVCacheCoordinator.find_longest_cache_hit",
    ),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager.cache_blocks", "KVCacheManager.get_computed_blocks"),
}
_ALLOCATING: Modules = {
    "vllm.v1.core.single_type_kv_cache_manager": (
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        "SingleTypeKVCacheManager.allocate_new_blocks",
        "SingleTypeKVCacheManager.cache_blocks",
        "SingleTypeKVCacheManager.remove_skipped_blocks",
        "FullAttentionManager.cache_blocks",
        "SlidingWindowManager",
        "MambaManager",
    ),
    "vllm.v1.core.kv_cache_coordinator": (
        "KVCacheCoordinator.get_num_blocks_to_allocate",
        "KVCacheCoordinator.cache_blocks",
        "KVCacheCoordinator.remove_skipped_blocks",
    ),
    "vllm.v1.core.kv_cache_manager": (
        "KVCacheBlocks",
        "KVCacheManager.allocate_slots",
        "KVCacheManager.cache_blocks",
        "KVCacheManager.free",
        "KVCacheManager.pop_blocks_for_free",
        "KVCacheManager.create_kv_cache_blocks",
        "KVCacheManager.take_boundary_state_offloads",
    ),
}
_SCHEDULING: Modules = {
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.__init__",
        "Scheduler.schedule",
        "Scheduler._make_cached_request_data",
        "Scheduler._update_after_schedule",
        "Scheduler.update_from_output",
        "Scheduler._update_request_with_output",
        "Scheduler._mamba_block_aligned_split",
        "Scheduler._preempt_request",
        "Scheduler._free_request",
        "Scheduler._get_new_block_ids_to_zero",
        "Scheduler.get_request_counts",
        "Scheduler.get_grammar_bitmask",
        "Scheduler.make_stats",
        "Scheduler.finish_requests",
    ),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.core.sched.output": ("CachedRequestData", "SchedulerOutput"),
    "vllm.v1.core.sched.utils": ("check_stop",),
    "vllm.v1.core.kv_cache_utils": ("get_request_block_hasher",),
    "vllm.v1.request": (
        "Request.append_output_token_ids",
        "Request.num_tokens",
        "Request.is_finished",
        "RequestStatus",
    ),
    "vllm.v1.outputs": ("ModelRunnerOutput",),
    "vllm.v1.engine": ("EngineCoreOutput", "EngineCoreOutputs"),
}
_ROWS: Modules = {
    "vllm.v1.outputs": ("ModelRunnerOutput",),
    "vllm.v1.engine": ("EngineCoreOutput", "EngineCoreOutputs"),
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.update_from_output",
        "Scheduler._update_request_with_output",
    ),
    "vllm.v1.request": ("Request.append_output_token_ids",),
    "vllm.v1.worker.cpu_model_runner": ("CPUModelRunner",),
    "vllm.v1.worker.gpu_model_runner": (
        "GPUModelRunner._bookkeeping_sync",
        "AsyncGPUModelRunnerOutput.get_output",
    ),
    "vllm.v1.worker.gpu.async_utils": ("AsyncOutput.get_output",),
    "vllm.distributed.device_communicators.shm_broadcast": ("MessageQueue.enqueue",),
}
_KEPT_STATES: Modules = {
    "vllm.v1.core.single_type_kv_cache_manager": ("MambaManager",),
    "vllm.v1.core.sched.scheduler": ("Scheduler.__init__", "Scheduler._mamba_block_aligned_split"),
}
_STATES: Modules = {
    "vllm.model_executor.layers.mamba.abstract": ("MambaBase.get_kv_cache_spec",),
    "vllm.model_executor.layers.mamba.mamba_mixer2": ("MambaMixer2.get_kv_cache_spec",),
}
_LAYOUT: Modules = {
    "vllm.platforms.interface": ("Platform._align_hybrid_block_size", "Platform._find_non_ssm_backends"),
    "vllm.v1.attention.backends.utils": ("get_supported_kv_cache_layouts", "resolve_kv_cache_layout"),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
    "vllm.v1.kv_cache_interface": ("UniformTypeKVCacheSpecs", "MambaSpec"),
    "vllm.v1.worker.gpu.attn_utils": ("get_kv_cache_spec",),
    "vllm.v1.worker.worker_base": ("WorkerBase.get_supported_kv_cache_layouts",),
    "vllm.v1.core.kv_cache_utils": ("_get_packed_kv_cache_groups", "get_kv_cache_config_from_groups"),
}
_ENGINE_STEP: Modules = {
    "vllm.v1.engine.core": (
        "EngineCore._initialize_kv_caches",
        "EngineCore.step",
        "EngineCore.step_with_batch_queue",
    ),
    "vllm.v1.worker.gpu.attn_utils": ("get_kv_cache_spec",),
    "vllm.v1.attention.backends.utils": ("get_supported_kv_cache_layouts",),
    "vllm.v1.executor.abstract": ("Executor.__init__", "Executor.set_kv_cache_layout"),
}
_EXECUTOR: Modules = {
    "vllm.v1.executor.abstract": (
        "Executor.initialize_from_config",
        "Executor.get_kv_cache_specs",
        "Executor.get_supported_kv_cache_layouts",
        "Executor.determine_available_memory",
        "Executor.execute_model",
        "Executor.sample_tokens",
    ),
}
_COLUMNS: Modules = {
    "vllm.v1.engine": ("EngineCoreOutput", "EngineCoreOutputs"),
    "vllm.v1.engine.core": (
        "EngineCore.abort_requests",
        "EngineCore._attach_weight_version",
        "EngineCore.step",
        "EngineCore.step_with_batch_queue",
        "EngineCore._process_aborts_queue",
        "EngineCoreProc._process_engine_step",
    ),
    "vllm.v1.engine.core_client": (
        "AsyncMPClient._ensure_output_queue_task",
        "AsyncMPClient.get_output_async",
        "AsyncMPClient._send_input",
    ),
    "vllm.v1.engine.async_llm": ("AsyncLLM.generate", "AsyncLLM._run_output_handler"),
    "vllm.v1.engine.output_processor": (
        "RequestOutputCollector",
        "RequestState",
        "OutputProcessor.__init__",
        "OutputProcessor.propagate_error",
        "OutputProcessor.abort_requests",
        "OutputProcessor.add_request",
        "OutputProcessor.process_outputs",
        "OutputProcessor._finish_request",
        "OutputProcessor._update_stats_from_output",
    ),
    "vllm.v1.engine.detokenizer": (
        "IncrementalDetokenizer",
        "BaseIncrementalDetokenizer.update",
        "BaseIncrementalDetokenizer.get_next_output_text",
        "FastIncrementalDetokenizer",
    ),
    "vllm.v1.engine.logprobs": ("LogprobsProcessor",),
    "vllm.v1.metrics.stats": ("RequestStateStats", "IterationStats.update_from_output"),
    "vllm.v1.metrics.loggers": ("PrometheusStatLogger.record",),
    "vllm.outputs": ("CompletionOutput", "RequestOutput"),
}
_INPUT_LOOP: Modules = {"vllm.v1.engine.core": ("EngineCoreProc._process_input_queue",)}

PARTS: dict[str, Part] = {
    "pool": Part((_BLOCK_POOL, _FREEING, _WINDOWS)),
    "states": Part((_BLOCK_POOL, _FREEING, _WINDOWS, _KEPT_STATES)),
    "decode": Part((_ROWS, _ALLOCATING, _SCHEDULING), calls=(_INPUT_LOOP,)),
    "outputs": Part(
        (_COLUMNS,),
        calls=(
            {
                "vllm.v1.engine.async_llm": ("AsyncLLM.__init__",),
                "vllm.v1.engine": ("EngineCoreRequestType",),
            },
        ),
    ),
    "layout": Part((_LAYOUT, _STATES)),
    "simulator": Part((_ENGINE_STEP,), calls=(_EXECUTOR,)),
}
"""The parts, in the order of `kvtune doctor`. `simulator`: `--on sim`; plugin/core/plugin.py switches the others."""

_NAMES = dict.fromkeys((symbol.module, symbol.name) for part in PARTS.values() for symbol in part.symbols())
SYMBOLS: dict[str, tuple[str, ...]] = {
    module: tuple(name for place, name in _NAMES if place == module) for module, _ in _NAMES
}
"""Every symbol of every part, by module: what a manifest describes."""
