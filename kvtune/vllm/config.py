"""The parts of vLLM's configuration, KV cache specs and attention backends that kvtune uses.

Protocols only, as in types.py: importing this imports nothing of vLLM. Each has the name of vLLM's class, or names that
class in its docstring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class CacheConfig(Protocol):
    block_size: int
    user_specified_block_size: bool
    cache_dtype: str
    kv_cache_dtype_skip_layers: Sequence[str]
    enable_prefix_caching: bool
    prefix_match_unit: int | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks: int | None
    num_gpu_blocks_override: int | None
    mamba_block_size: int | None
    mamba_cache_mode: str
    mamba_page_size_padded: int | None


class HfConfig(Protocol):
    """The model's config.json, as transformers reads it."""

    def to_dict(self) -> dict[str, object]: ...


class TextConfig(Protocol):
    """The part of config.json about text: the whole file for a text-only model."""

    num_hidden_layers: int


class ModelConfig(Protocol):
    architecture: str
    architectures: Sequence[str]
    dtype: object
    enforce_eager: bool
    hf_config: HfConfig
    hf_text_config: TextConfig
    is_hybrid: bool
    max_model_len: int
    use_mla: bool

    def get_vocab_size(self) -> int: ...


class ParallelConfig(Protocol):
    data_parallel_size: int
    decode_context_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    tensor_parallel_size: int
    distributed_executor_backend: object


class SchedulerConfig(Protocol):
    async_scheduling: bool
    enable_chunked_prefill: bool
    max_num_batched_tokens: int
    max_num_scheduled_tokens: int | None
    max_num_seqs: int
    stream_interval: int
    scheduler_cls: object


class SpeculativeConfig(Protocol):
    draft_model_config: ModelConfig

    def use_eagle(self) -> bool: ...
    def uses_draft_model(self) -> bool: ...


class Transfer(Protocol):
    """KVTransferConfig."""

    kv_connector: str | None
    kv_connector_extra_config: dict[str, object]


class CompilationConfig(Protocol):
    cudagraph_mode: object
    max_cudagraph_capture_size: int | None
    static_forward_context: Mapping[str, object]


class VllmConfig(Protocol):
    cache_config: CacheConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    kv_transfer_config: Transfer | None
    speculative_config: SpeculativeConfig | None
    compilation_config: CompilationConfig

    @property
    def use_v2_model_runner(self) -> bool: ...


class KVCacheSpec(Protocol):
    """What a layer stores in a block. Specs of windows, states and groups of layers have more attributes."""

    block_size: int
    prefix_cacheable: bool

    @property
    def page_size_bytes(self) -> int: ...
    def copy_with_new_block_size(self, block_size: int) -> KVCacheSpec: ...


class KVCacheGroup(Protocol):
    """KVCacheGroupSpec: layers that share one block table."""

    layer_names: Sequence[str]
    kv_cache_spec: KVCacheSpec


class KVCacheConfig(Protocol):
    num_blocks: int
    hash_block_size: int | None
    cache_hit_alignment_tokens: int | None
    prefix_cache_retention_interval: int | None
    kv_cache_groups: Sequence[KVCacheGroup]


class Layout(Protocol):
    """KVCacheLayout: the order of a cache's axes."""

    name: str
    is_block_outermost: bool
    is_block_compact: bool


class MultipleOf(Protocol):
    """A block size: any multiple of `base` tokens."""

    base: int


class Backend(Protocol):
    """An attention backend's class."""

    def get_name(self) -> str: ...
    def supported_kv_cache_layouts(self) -> Iterable[Layout] | None: ...
    def get_supported_kernel_block_sizes(self) -> Iterable[int | MultipleOf]: ...


class HybridPlatform(Protocol):
    """The class of a platform that sizes the blocks of models with states."""

    def _find_non_ssm_backends(self, vllm_config: VllmConfig) -> Sequence[Backend]: ...
