"""The parts of vLLM's objects that the simulator reads, calls or replaces, as Protocols; vllm/types.py has more.

Types only: importing this module imports nothing of vLLM. Methods that the simulator replaces on an instance are
declared as callables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from kvtune.device.cost import StepCost
from kvtune.sim.clock import VirtualClock
from kvtune.vllm import types as core
from kvtune.vllm.config import VllmConfig

EngineRequest = core.Request
Block = core.KVCacheBlock
ScheduledStep = core.ScheduledStep


class LookupPool(Protocol):
    """What vLLM's prefix lookups need of a pool."""

    hash_block_size: int
    null_block: Block

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Block] | None: ...


class Pool(LookupPool, core.BlockPool, Protocol):
    """BlockPool."""

    def get_num_free_blocks(self) -> int: ...
    def get_new_blocks(self, num_blocks: int) -> list[Block]: ...
    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...


class GroupManager(core.GroupManager, Protocol):
    """SingleTypeKVCacheManager: one KV cache group's blocks, by request."""

    dcp_world_size: int
    pcp_world_size: int
    allocate_new_blocks: Callable[..., list[Block]]


class Coordinator(core.Coordinator, Protocol):
    single_type_managers: Sequence[GroupManager]
    eagle_group_ids: Sequence[int]
    scheduler_block_size: int
    cache_blocks: Callable[[EngineRequest, int], None]


class CacheManager(core.KVCacheManager, Protocol):
    """KVCacheManager."""

    enable_caching: bool
    watermark_blocks: int
    block_pool: Pool
    coordinator: Coordinator
    get_computed_blocks: Callable[..., tuple[core.KVCacheBlocks, int, int]]
    allocate_slots: Callable[..., core.KVCacheBlocks | None]
    free: Callable[[EngineRequest], None]
    pop_blocks_for_free: Callable[[EngineRequest], list[Block]]
    estimate_cached_tokens: Callable[[EngineRequest], int]

    def prefix_cache_lookup_enabled(self, request: EngineRequest) -> bool: ...
    def cache_blocks(self, request: EngineRequest, num_computed_tokens: int) -> None: ...
    def create_kv_cache_blocks(self, blocks: tuple[list[Block], ...]) -> core.KVCacheBlocks: ...


class SchedulerLimits(Protocol):
    """SchedulerConfig."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int


class EngineScheduler(core.Scheduler, Protocol):
    """Scheduler, or a subclass. `running` is in the order in which requests are scheduled."""

    running: list[EngineRequest]
    waiting: Collection[EngineRequest]  # a RequestQueue
    requests: dict[str, EngineRequest]
    kv_cache_manager: CacheManager
    scheduler_config: SchedulerLimits
    policy: object
    hash_block_size: int
    num_spec_tokens: int
    max_model_len: int
    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    current_step: int
    need_mamba_block_aligned_split: bool
    kv_holding_waiting: Collection[object]
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]
    prev_step_scheduled_req_ids: set[str]
    make_spec_decoding_stats: Callable[..., object]
    _pause_state: object
    _update_request_with_output: Callable[..., tuple[list[int], bool]]

    def add_request(self, request: EngineRequest) -> None: ...
    def has_requests(self) -> bool: ...
    def shutdown(self) -> None: ...
    def update_from_output(self, output: SchedulerOutput, result: ModelOutput) -> Outputs: ...


class SchedulerOutput(ScheduledStep, Protocol):
    total_num_scheduled_tokens: int
    kv_connector_metadata: object
    finished_req_ids: set[str]
    preempted_req_ids: set[str] | None


class ModelOutput(Protocol):
    """ModelRunnerOutput: one row of sampled tokens for each scheduled request."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    kv_connector_output: object


class RequestOutput(Protocol):
    """EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    prefill_stats: core.PrefillStats | None
    events: Sequence[core.Event] | None
    finish_reason: object


class RequestOutputs(Protocol):
    """EngineCoreOutputs: what one client gets from a step."""

    outputs: Sequence[RequestOutput]


Outputs = Mapping[int, RequestOutputs]
"""A step's outputs by client."""


class Machine(Protocol):
    @property
    def clock(self) -> VirtualClock: ...
    @property
    def cost(self) -> StepCost: ...


class PendingOutput(Protocol):
    """A future of a step's output, done at a virtual time. The fast steppers change it while it waits in the queue."""

    end_s: float
    value: ModelOutput

    def result(self, timeout: float | None = None) -> ModelOutput: ...


class TierCopies(Protocol):
    def next_end_s(self) -> float | None: ...


class Tier(Protocol):
    """The tier of host memory."""

    @property
    def copies(self) -> TierCopies: ...
    def quiet(self, connector: object) -> bool: ...


class Executor(core.Executor, Protocol):
    """SimExecutor, or a real one that lives on virtual time."""

    execute_model: Callable[..., PendingOutput]
    requests: dict[str, EngineRequest]
    on_step: Callable[..., None] | None  # takes a steps.ExecutedStep
    tier: Tier | None

    @property
    def machine(self) -> Machine: ...


class EngineCore(Protocol):
    """vLLM's EngineCore with a SimExecutor."""

    scheduler: EngineScheduler  # the core's subclasses have more: fast/steady_path.py
    model_executor: Executor
    vllm_config: VllmConfig
    batch_queue: deque[tuple[PendingOutput, SchedulerOutput, PendingOutput]] | None
    """Batches sent and not yet updated, the newest first; None where scheduling is synchronous."""
    batch_queue_size: int

    @property
    def step_fn(self) -> Callable[[], tuple[Outputs | None, bool]]: ...
    def post_step(self, model_executed: bool) -> None: ...
    def add_request(self, request: EngineRequest) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
