"""Tells whether a step that only decodes changes nothing in a host-memory tier. Runs in EngineCore.

vLLM's offloading connector is asked in every step. It changes nothing in one whose requests have all offered their
prompts, while nothing is copied and no request has ended since the step before: outputs are not offered
(`offload_prompt_only`), and blocks that are given out concern only copies under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, cast

from kvtune.core.steps.steady import Rows
from kvtune.vllm.types import Request

MANAGERS = ("CPUOffloadingManager",)
"""Managers that do nothing at the end of a step."""


class Group(Protocol):
    """GroupOffloadConfig."""

    tokens_per_chunk: int
    requires_cow_source: bool


class GroupState(Protocol):
    next_stored_chunk_idx: int


class Config(Protocol):
    """SchedulerOffloadConfig."""

    kv_group_configs: Sequence[Group]
    offload_prompt_only: bool


class Status(Protocol):
    """RequestOffloadState."""

    group_states: Sequence[GroupState]
    max_offload_tokens: int | None


class Side(Protocol):
    """OffloadingConnectorScheduler."""

    config: Config
    manager: object
    _req_status: dict[str, Status]
    _jobs: dict[int, object]
    _current_batch_load_jobs: dict[int, object]
    _current_batch_jobs_to_flush: set[int]
    _current_batch_allocated_block_ids: set[int]


class Connector(Protocol):
    """OffloadingConnector in the scheduler's role."""

    connector_scheduler: Side


class Tier:
    """The scheduler's side of one connector, of the kind that this module knows."""

    def __init__(self, connector: Connector, side: Side, nothing: Callable[[], object]) -> None:
        self.connector = connector
        self.nothing_to_copy = nothing
        self._side = side
        self._stored: tuple[Rows | None, int] = (None, 0)

    def quiet(self, finished: Collection[str]) -> bool:
        """Whether nothing is copied or about to be, and the connector was told of every request that ended."""
        side = self._side
        return not (
            finished
            or side._jobs
            or side._current_batch_load_jobs
            or side._current_batch_jobs_to_flush
            or side._current_batch_allocated_block_ids
        )

    def has_offered(self, rows: Rows) -> bool:
        """Whether the whole prompt of each row was offered to the tier."""
        generation = getattr(self._side.manager, "_cache_generation", 0)  # after a reset all is offered again
        if self._stored != (rows, generation):
            if not all(map(self.offered, rows.requests)):
                return False
            self._stored = rows, generation
        return True

    def offered(self, request: Request) -> bool:
        status = self._side._req_status.get(request.request_id)
        if status is None or status.max_offload_tokens is not None:
            return False
        groups = zip(self._side.config.kv_group_configs, status.group_states, strict=True)
        prompt = request.num_prompt_tokens
        return all(state.next_stored_chunk_idx >= prompt // group.tokens_per_chunk for group, state in groups)


def tier_of(connector: object) -> Tier | None:
    """The tier of a scheduler's connector; None without one, or for another kind than the one known here."""
    if type(connector).__name__ != "OffloadingConnector":
        return None
    offloading = cast("Connector", connector)
    side = offloading.connector_scheduler
    if type(side.manager).__name__ not in MANAGERS or not side.config.offload_prompt_only:
        return None
    if any(group.requires_cow_source for group in side.config.kv_group_configs):
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

    def nothing() -> object:
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())

    return Tier(offloading, side, nothing)


def has_news(output: object) -> bool:
    """Whether a worker's connector has something to report (KVConnectorOutput)."""
    is_empty: Callable[[], bool] | None = getattr(output, "is_empty", None)
    return output is not None and (is_empty is None or not is_empty())
