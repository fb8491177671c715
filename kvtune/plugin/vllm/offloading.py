"""The scheduler's side of vLLM's offloading connector, with the methods that kvtune replaces. Types only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol, TypeGuard

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
        SchedulerOffloadConfig,
    )
    from vllm.v1.kv_offload.base import PrepareStoreOutput as PrepareStoreOutput
    from vllm.v1.kv_offload.base import ReqContext as ReqContext
    from vllm.v1.outputs import KVConnectorOutput as KVConnectorOutput
    from vllm.v1.request import Request as Request
else:

    def __getattr__(name: str) -> object:
        return object


Key = bytes
"""OffloadKey: the hash at the end of a chunk, and its KV cache group."""
Matched = tuple[int | None, bool]
"""The tokens that a tier adds to the pool's (None: ask again), and whether they come later."""


class Manager(Protocol):
    """CPUOffloadingManager. `prepare_store` returns None if the tier has no room."""

    _num_chunks: int
    prepare_store: Callable[[Collection[Key], ReqContext], PrepareStoreOutput | None]
    prepare_load: Callable[[Collection[Key], ReqContext], object]
    complete_load: Callable[[Collection[Key], ReqContext], None]
    reset_cache: Callable[[], None]


class SchedulerSide(Protocol):
    """OffloadingConnectorScheduler. `get_num_new_matched_tokens` returns None tokens if a request must ask again."""

    manager: Manager
    config: SchedulerOffloadConfig
    _req_status: Mapping[str, RequestOffloadState]
    get_num_new_matched_tokens: Callable[..., Matched]
    update_connector_output: Callable[[KVConnectorOutput], None]


class Connector(Protocol):
    """OffloadingConnector in the scheduler's role."""

    connector_scheduler: SchedulerSide


def has_tier(connector: object) -> TypeGuard[Connector]:
    """Whether a scheduler's `connector` is vLLM's own offloading to host memory."""
    return type(connector).__name__ == "OffloadingConnector"
