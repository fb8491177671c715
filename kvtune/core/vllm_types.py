"""The parts of vLLM's objects that the core and the probe read and change, as Protocols.

Types only: importing this imports nothing of vLLM, and mypy, which does not see vLLM, checks our use of it against
these. Each is named as vLLM's class, and holds what is used here and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from typing import Any, Protocol

BlockIds = tuple[list[int], ...]
"""Ids of KV cache blocks, one list per KV cache group."""


class Request(Protocol):
    """One request, from its arrival until it is freed."""

    request_id: str
    status: int
    client_index: int
    max_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_output_placeholders: int
    num_stale_output_tokens: int
    num_preemptions: int
    num_nans_in_logits: int
    next_decode_eligible_step: int
    is_prefill_chunk: bool
    resumable: bool
    sampling_params: Any
    prompt_token_ids: list[int] | None
    spec_token_ids: list[int]
    stop_reason: int | str | None
    events: Sequence[Any]
    prefill_stats: Any  # PrefillStats until the first output takes it
    structured_output_request: Any
    mm_features: Any
    lora_request: Any
    prompt_embeds: Any
    trace_headers: Any
    kv_transfer_params: Any
    ec_transfer_params: Any
    block_hashes: list[bytes]
    _all_token_ids: MutableSequence[int]
    _output_token_ids: MutableSequence[int]
    _block_hasher: Callable[..., Any] | None

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    def update_block_hashes(self) -> None: ...
    def append_output_token_ids(self, token_ids: list[int]) -> None: ...


class KVCacheBlock(Protocol):
    block_id: int
    ref_cnt: int
    is_null: bool
    pool: Any
    block_hash: bytes | None
    _block_hash: bytes | None  # the key under which the pool finds it: with its group
    _block_hash_num_tokens: int | None
    prev_free_block: KVCacheBlock | None
    next_free_block: KVCacheBlock | None


class FreeQueue(Protocol):
    """FreeKVCacheBlockQueue, or the core's tiers, which also have `names`, `taken` and `demoted`."""

    num_free_blocks: int

    def popleft_n(self, n: int) -> list[KVCacheBlock]: ...
    def get_all_free_blocks(self) -> list[KVCacheBlock]: ...


class BlockPool(Protocol):
    num_gpu_blocks: int
    hash_block_size: int
    blocks: list[KVCacheBlock]
    free_block_queue: Any  # a FreeQueue; the core exchanges it and reads its tiers
    cached_block_hash_to_block: Any
    cached_block_hashes_by_block: Mapping[int, Any]

    def get_num_free_blocks(self) -> int: ...


class GroupManager(Protocol):
    """SingleTypeKVCacheManager: the blocks of one KV cache group. A window or state group has more attributes."""

    block_size: int
    block_pool: BlockPool
    kv_cache_spec: Any
    enable_caching: bool
    req_to_blocks: dict[str, list[KVCacheBlock]]
    num_cached_block: dict[str, int]


class Coordinator(Protocol):
    single_type_managers: Sequence[Any]  # GroupManagers
    eagle_group_ids: Sequence[int]
    num_reprefillable_tokens: int


class KVCacheBlocks(Protocol):
    """The blocks that `allocate_slots` gave a request."""

    def get_block_ids(self, allow_none: bool = False) -> BlockIds | None: ...


class KVCacheManager(Protocol):
    block_pool: BlockPool
    coordinator: Coordinator
    enable_caching: bool
    empty_kv_cache_blocks: KVCacheBlocks

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **options: Any
    ) -> KVCacheBlocks | None: ...
    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None: ...
    def new_step_starts(self) -> None: ...
    def take_boundary_state_offloads(self) -> Any: ...


class NewRequestData(Protocol):
    num_computed_tokens: int
    block_ids: BlockIds


class CachedRequests(Protocol):
    """Of a CachedRequestData: requests that the workers know from an earlier step, column by column."""

    new_block_ids: Sequence[Any]  # BlockIds, or None for no new block
    num_computed_tokens: Sequence[int]


class CachedRequestData(CachedRequests, Protocol):
    req_ids: list[str]
    resumed_req_ids: set[str]
    num_output_tokens: list[int]


class ScheduledStep(Protocol):
    """Of a SchedulerOutput: which requests run, with which blocks."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Sequence[NewRequestData]

    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...


class SchedulerOutput(ScheduledStep, Protocol):
    """What one step runs."""

    total_num_scheduled_tokens: int
    scheduled_cached_reqs: CachedRequestData
    scheduled_spec_decode_tokens: Mapping[str, Any]
    finished_req_ids: set[str]
    preempted_req_ids: set[str] | None


class Scheduler(Protocol):
    """Scheduler or AsyncScheduler. `running` is in the order in which requests are scheduled."""

    running: list[Request]
    waiting: Any  # a RequestQueue: truthy, and with a length
    requests: dict[str, Request]
    kv_cache_manager: KVCacheManager
    kv_cache_config: Any
    vllm_config: Any
    deferred_frees: Any
    schedule: Callable[..., SchedulerOutput]
    update_from_output: Callable[..., Any]
    add_request: Callable[[Request], Any]
    _free_request: Callable[..., Any]


class EngineCore(Protocol):
    scheduler: Scheduler
    model_executor: Any
    batch_queue: Any
    """None where every step waits for its own output."""

    def has_work(self) -> bool: ...


class Backend(Protocol):
    """An attention backend's class."""

    def get_name(self) -> str: ...
    def supported_kv_cache_layouts(self) -> Iterable[Any] | None: ...
    def get_supported_kernel_block_sizes(self) -> Iterable[Any]: ...
