"""The parts of vLLM's objects that kvtune reads, calls and replaces: vLLM's own types, or Protocols.

Importing this module imports nothing of vLLM; mypy reads vLLM's types where it is installed. Each Protocol has the name
of vLLM's class, or names that class in its docstring, and has only the attributes that kvtune uses. Methods that kvtune
replaces on an instance are declared as callables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig as KVTransferConfig
    from vllm.config import ModelConfig as ModelConfig
    from vllm.config import SchedulerConfig as SchedulerConfig
    from vllm.config import VllmConfig as VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
        SchedulerOffloadConfig,
    )
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backend import MultipleOf as MultipleOf
    from vllm.v1.core.sched.output import NewRequestData as NewRequestData
    from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec as KVCacheGroupSpec
    from vllm.v1.kv_cache_interface import KVCacheSpec as KVCacheSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout as KVCacheLayout
    from vllm.v1.kv_offload.base import PrepareStoreOutput as PrepareStoreOutput
    from vllm.v1.kv_offload.base import ReqContext as ReqContext
    from vllm.v1.metrics.stats import PrefillStats as PrefillStats
    from vllm.v1.outputs import KVConnectorOutput as KVConnectorOutput
    from vllm.v1.outputs import ModelRunnerOutput as ModelRunnerOutput
    from vllm.v1.request import Request as Request

    Backend = type[AttentionBackend]
else:

    def __getattr__(name: str) -> object:
        return object


class HybridPlatform(Protocol):
    """The class of a platform that sizes the blocks of models with states."""

    def _find_non_ssm_backends(self, vllm_config: VllmConfig) -> Sequence[Backend]: ...


BlockIds = tuple[list[int], ...]
"""Ids of KV cache blocks, one list per KV cache group."""


class KVCacheBlock(Protocol):
    block_id: int
    ref_cnt: int
    is_null: bool
    pool: object  # the simulator's pool that has the block
    block_hash: bytes | None
    _block_hash: bytes | None  # the key under which the pool finds it: with its group
    _block_hash_num_tokens: int | None
    prev_free_block: KVCacheBlock | None
    next_free_block: KVCacheBlock | None


class FreeQueue(Protocol):
    """The free blocks of a pool; the first one is given out next."""

    @property
    def num_free_blocks(self) -> int: ...
    def popleft_n(self, n: int) -> list[KVCacheBlock]: ...
    def get_all_free_blocks(self) -> list[KVCacheBlock]: ...


class PolicyQueues(FreeQueue, Protocol):
    """The core's eviction queues by number (plugin/core/cache/queues.py); vLLM has none. 0 means no queue."""

    names: Sequence[str]
    queues: Sequence[FreeQueue]
    taken: list[int]
    queue_of: bytearray
    """The number of each block's queue, by block id."""


def has_queues(queue: FreeQueue) -> TypeGuard[PolicyQueues]:
    return hasattr(queue, "taken")


class BlockMap(Protocol):
    """BlockHashToBlockMap: from a block hash, with its group, to a block, or to several by id."""

    insert: Callable[[bytes, KVCacheBlock], None]
    pop: Callable[[bytes, int], KVCacheBlock | None]
    _cache: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]]

    def contain(self, key: bytes, block_id: int) -> bool: ...
    def get_one_block(self, key: bytes) -> KVCacheBlock | None: ...


class LookupPool(Protocol):
    """The methods of a block pool that vLLM's prefix lookups call."""

    hash_block_size: int
    null_block: KVCacheBlock

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None: ...


class BlockPool(LookupPool, Protocol):
    num_gpu_blocks: int
    blocks: list[KVCacheBlock]
    free_block_queue: FreeQueue

    @property
    def cached_block_hash_to_block(self) -> BlockMap: ...
    @property
    def cached_block_hashes_by_block(self) -> Mapping[int, Collection[bytes]]: ...

    def get_num_free_blocks(self) -> int: ...
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]: ...
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None: ...


class GroupManager(Protocol):
    """SingleTypeKVCacheManager: the blocks of one KV cache group, by request."""

    block_size: int
    block_pool: BlockPool
    kv_cache_group_id: int
    kv_cache_spec: KVCacheSpec
    enable_caching: bool
    req_to_blocks: dict[str, list[KVCacheBlock]]
    num_cached_block: dict[str, int]
    dcp_world_size: int
    pcp_world_size: int
    allocate_new_blocks: Callable[..., list[KVCacheBlock]]
    _record_new_block_ids: bool


class WindowManager(GroupManager, Protocol):
    """SlidingWindowManager."""

    sliding_window: int
    extra_retained_tokens: int

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int) -> None: ...


class StateManager(GroupManager, Protocol):
    """MambaManager: the group of recurrent states."""

    mamba_cache_mode: str
    num_speculative_blocks: int
    has_prefill_checkpoint_blocks: bool
    last_state_block_idx: dict[str, int]
    _checkpoints: Collection[str]
    _num_retired_blocks: dict[str, int]
    _partial_hit_reqs: Collection[str]


def has_window(group: GroupManager) -> TypeGuard[WindowManager]:
    return bool(getattr(group, "sliding_window", 0))


def has_states(group: GroupManager) -> TypeGuard[StateManager]:
    return hasattr(group, "mamba_cache_mode")


class Coordinator(Protocol):
    @property
    def single_type_managers(self) -> Sequence[GroupManager]: ...

    eagle_group_ids: Sequence[int]
    num_reprefillable_tokens: int
    scheduler_block_size: int
    cache_blocks: Callable[[Request, int], None]

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[object, int]: ...


class SpecGroup(Protocol):
    """The groups of one spec, which are searched together."""

    manager_cls: type

    def __iter__(self) -> Iterator[Any]: ...
    def _replace(self, **fields: object) -> SpecGroup: ...


class HybridCoordinator(Coordinator, Protocol):
    """HybridKVCacheCoordinator."""

    attention_groups: list[SpecGroup]


def has_several_specs(coordinator: Coordinator) -> TypeGuard[HybridCoordinator]:
    return hasattr(coordinator, "attention_groups")


class KVCacheBlocks(Protocol):
    """The blocks that `allocate_slots` gave a request."""

    def get_block_ids(self, allow_none: bool = False) -> BlockIds | None: ...


class KVCacheManager(Protocol):
    block_pool: BlockPool
    coordinator: Coordinator
    enable_caching: bool
    empty_kv_cache_blocks: KVCacheBlocks
    get_computed_blocks: Callable[..., tuple[KVCacheBlocks, int, int]]
    allocate_slots: Callable[..., KVCacheBlocks | None]
    free: Callable[[Request], None]
    pop_blocks_for_free: Callable[[Request], list[KVCacheBlock]]
    estimate_cached_tokens: Callable[[Request], int]
    get_blocks: Callable[[str], KVCacheBlocks]

    def prefix_cache_lookup_enabled(self, request: Request) -> bool: ...
    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None: ...
    def new_step_starts(self) -> None: ...
    def take_boundary_state_offloads(self) -> object: ...


class CachedRequests(Protocol):
    """A part of CachedRequestData: requests that the workers know from an earlier step, one list for each attribute."""

    @property
    def new_block_ids(self) -> Sequence[BlockIds | None]: ...  # None for no new block
    @property
    def num_computed_tokens(self) -> Sequence[int]: ...


class ScheduledStep(Protocol):
    """A part of SchedulerOutput: which requests run, with which blocks."""

    num_scheduled_tokens: dict[str, int]

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequestData]: ...
    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...


Outputs = Mapping[int, "EngineCoreOutputs"]
"""A step's outputs by client."""


class Scheduler(Protocol):
    """Scheduler or AsyncScheduler. `running` is in the order in which requests are scheduled."""

    running: list[Request]
    waiting: Collection[Request]  # a RequestQueue
    current_step: int
    requests: dict[str, Request]
    kv_cache_manager: KVCacheManager
    kv_cache_config: KVCacheConfig
    vllm_config: VllmConfig
    scheduler_config: SchedulerConfig
    policy: object
    connector: object
    hash_block_size: int
    num_spec_tokens: int
    max_model_len: int
    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    kv_holding_waiting: Collection[object]
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]
    prev_step_scheduled_req_ids: set[str]
    schedule: Callable[..., SchedulerOutput]
    update_from_output: Callable[..., Outputs]
    add_request: Callable[[Request], object]
    make_spec_decoding_stats: Callable[..., object]
    _free_request: Callable[..., object]
    _preempt_request: Callable[..., object]
    _pause_state: object

    def has_requests(self) -> bool: ...
    def get_request_counts(self) -> tuple[int, int]: ...
    def get_kv_cache_usage(self) -> float: ...
    def shutdown(self) -> None: ...


class EngineCore(Protocol):
    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def model_executor(self) -> object: ...

    @property
    def batch_queue(self) -> Collection[object] | None:
        """The batches in flight; None if every step waits for its output."""

    def has_work(self) -> bool: ...


Key = bytes
"""OffloadKey: the hash at the end of a chunk, and its KV cache group."""
Matched = tuple[int | None, bool]
"""The tokens that a tier adds to the pool's (None: ask again), and whether they come later."""


class TierManager(Protocol):
    """CPUOffloadingManager. `prepare_store` returns None if the tier has no room."""

    _num_chunks: int
    prepare_store: Callable[[Collection[Key], ReqContext], PrepareStoreOutput | None]
    prepare_load: Callable[[Collection[Key], ReqContext], object]
    complete_load: Callable[[Collection[Key], ReqContext], None]
    reset_cache: Callable[[], None]


class SchedulerSide(Protocol):
    """OffloadingConnectorScheduler. `get_num_new_matched_tokens` returns None tokens if a request must ask again."""

    manager: TierManager
    config: SchedulerOffloadConfig
    _req_status: Mapping[str, RequestOffloadState]
    get_num_new_matched_tokens: Callable[..., Matched]
    update_connector_output: Callable[[KVConnectorOutput], None]


class TierConnector(Protocol):
    """OffloadingConnector in the scheduler's role."""

    connector_scheduler: SchedulerSide


def has_tier(connector: object) -> TypeGuard[TierConnector]:
    """Whether a scheduler's `connector` is vLLM's own offloading to host memory."""
    return type(connector).__name__ == "OffloadingConnector"
