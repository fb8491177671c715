"""The parts of vLLM's offloading connector, scheduler's side, that kvtune uses. Types only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeGuard

Key = bytes
"""OffloadKey: the hash at the end of a chunk, and its KV cache group."""


class Request(Protocol):
    request_id: str

    def is_finished(self) -> bool: ...


class RequestState(Protocol):
    """RequestOffloadState."""

    req: Request


class Context(Protocol):
    """ReqContext."""

    req_id: str


class Stores(Protocol):
    """PrepareStoreOutput."""

    keys_to_store: Collection[Key]
    evicted_keys: Collection[Key]


class Manager(Protocol):
    """CPUOffloadingManager. `prepare_store` returns None if the tier has no room."""

    _num_chunks: int
    prepare_store: Callable[[Collection[Key], Context], Stores | None]
    prepare_load: Callable[[Collection[Key], Context], object]
    complete_load: Callable[[Collection[Key], Context], None]
    reset_cache: Callable[[], None]


class GroupConfig(Protocol):
    """GroupOffloadConfig: a KV cache group that is offloaded. A group without a window has full attention."""

    group_idx: int
    tokens_per_chunk: int
    sliding_window_size_in_chunks: int | None


class OffloadConfig(Protocol):
    """SchedulerOffloadConfig."""

    kv_group_configs: Sequence[GroupConfig]
    tokens_per_hash: int


class Copied(Protocol):
    """DirectionalTransferStats: bytes and seconds."""

    bytes: int
    time: float


class TransferStats(Protocol):
    store: Copied
    load: Copied


class WorkerMeta(Protocol):
    """OffloadingWorkerMetadata."""

    transfer_stats: TransferStats


class WorkerOutput(Protocol):
    """KVConnectorOutput."""

    kv_connector_worker_meta: WorkerMeta | None


class SchedulerSide(Protocol):
    """OffloadingConnectorScheduler. `get_num_new_matched_tokens` returns None tokens if a request must ask again."""

    manager: Manager
    config: OffloadConfig
    _req_status: Mapping[str, RequestState]
    get_num_new_matched_tokens: Callable[..., tuple[int | None, bool]]
    update_connector_output: Callable[[WorkerOutput], None]


class Connector(Protocol):
    """OffloadingConnector in the scheduler's role."""

    connector_scheduler: SchedulerSide


def has_tier(connector: object) -> TypeGuard[Connector]:
    """Whether a scheduler's `connector` is vLLM's own offloading to host memory."""
    return type(connector).__name__ == "OffloadingConnector"
