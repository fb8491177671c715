"""The parts of vLLM's objects that the simulator reads, calls or replaces, as Protocols.

Types only: importing this module imports nothing of vLLM. Methods that the simulator replaces on an instance are
declared as callables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """vLLM's Request."""

    request_id: str
    status: int
    max_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_preemptions: int
    is_prefill_chunk: bool
    spec_token_ids: list[int]
    block_hashes: list[bytes]
    prefill_stats: Any  # PrefillStats until the first output takes it

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    def update_block_hashes(self) -> None: ...
    def append_output_token_ids(self, token_ids: list[int]) -> None: ...


class Block(Protocol):
    """KVCacheBlock. `_block_hash` is the key under which the pool finds it, None without content."""

    block_id: int
    ref_cnt: int
    is_null: bool
    pool: Any
    _block_hash: bytes | None
    _block_hash_num_tokens: int | None


class BlockMap(Protocol):
    """The pool's map from a block hash (with its group) to a block."""

    insert: Callable[[bytes, Block], None]
    pop: Callable[[bytes, int], Block | None]

    def get_one_block(self, key: bytes) -> Block | None: ...


class LookupPool(Protocol):
    """What vLLM's prefix lookups need of a pool."""

    hash_block_size: int
    null_block: Block

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Block] | None: ...


class Pool(LookupPool, Protocol):
    """BlockPool."""

    cached_block_hash_to_block: BlockMap

    def get_num_free_blocks(self) -> int: ...
    def get_new_blocks(self, num_blocks: int) -> list[Block]: ...
    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...


class GroupManager(Protocol):
    """SingleTypeKVCacheManager: one KV cache group's blocks, by request."""

    block_size: int
    kv_cache_spec: Any
    dcp_world_size: int
    pcp_world_size: int
    req_to_blocks: Mapping[str, list[Block]]
    num_cached_block: Mapping[str, int]


class Coordinator(Protocol):
    single_type_managers: Sequence[GroupManager]
    eagle_group_ids: Sequence[int]
    scheduler_block_size: int
    cache_blocks: Callable[[EngineRequest, int], None]


class CacheManager(Protocol):
    """KVCacheManager."""

    enable_caching: bool
    watermark_blocks: int
    block_pool: Pool
    coordinator: Coordinator
    get_computed_blocks: Callable[[EngineRequest], tuple[Any, int, int]]
    allocate_slots: Callable[..., Any]
    free: Callable[[EngineRequest], None]
    pop_blocks_for_free: Callable[[EngineRequest], list[Block]]
    estimate_cached_tokens: Callable[[EngineRequest], int]

    def prefix_cache_lookup_enabled(self, request: EngineRequest) -> bool: ...
    def cache_blocks(self, request: EngineRequest, num_computed_tokens: int) -> None: ...
    def create_kv_cache_blocks(self, blocks: tuple[list[Block], ...]) -> Any: ...


class SchedulerLimits(Protocol):
    """SchedulerConfig."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int


class EngineScheduler(Protocol):
    """Scheduler, or a subclass. `running` is in the order in which requests are scheduled."""

    running: list[EngineRequest]
    waiting: Any  # RequestQueue: truthy while a request waits
    requests: dict[str, EngineRequest]
    kv_cache_manager: CacheManager
    scheduler_config: SchedulerLimits
    policy: Any
    hash_block_size: int
    max_model_len: int
    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    current_step: int
    need_mamba_block_aligned_split: bool
    kv_holding_waiting: Any
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]
    prev_step_scheduled_req_ids: set[str]
    make_spec_decoding_stats: Callable[..., Any]
    _pause_state: Any
    _update_request_with_output: Callable[..., tuple[list[int], bool]]

    def has_requests(self) -> bool: ...
    def shutdown(self) -> None: ...


class CachedRequests(Protocol):
    """CachedRequestData: requests that the workers know from an earlier step."""

    new_block_ids: Sequence[Any]
    num_computed_tokens: Sequence[int]


class ScheduledStep(Protocol):
    """What `probe.digest` reads of a SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Sequence[Any]
    scheduled_cached_reqs: CachedRequests


class SchedulerOutput(ScheduledStep, Protocol):
    total_num_scheduled_tokens: int


class ModelOutput(Protocol):
    """ModelRunnerOutput: one row of sampled tokens for each scheduled request."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]


class RequestOutput(Protocol):
    """EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    prefill_stats: Any
    events: Sequence[Any] | None
    finish_reason: Any


class RequestOutputs(Protocol):
    """EngineCoreOutputs: what one client gets from a step."""

    outputs: Sequence[RequestOutput]


Outputs = Mapping[int, RequestOutputs]
"""A step's outputs by client."""


class EngineCore(Protocol):
    """vLLM's EngineCore with a SimExecutor."""

    scheduler: EngineScheduler  # the core's subclasses have more: fast/steady_path.py
    model_executor: Any  # SimExecutor, or a real one that lives on virtual time
    vllm_config: Any
    batch_queue: Any

    @property
    def step_fn(self) -> Callable[[], tuple[Outputs | None, bool]]: ...
    def post_step(self, model_executed: bool) -> None: ...
    def add_request(self, request: EngineRequest) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
