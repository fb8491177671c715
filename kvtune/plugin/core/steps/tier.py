"""Tells whether a decode step may skip vLLM's offloading connector (a host-memory tier). Runs in EngineCore.

Stock calls the connector in every step. The connector changes nothing if every request's prompt was already offered to
the tier, no copy is under way and no request has ended since the last step: outputs are not offered
(`offload_prompt_only`), and new blocks matter only to copies under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvtune.plugin.core.steps.steady import Rows
from kvtune.plugin.vllm.types import Request

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

MANAGERS = ("CPUOffloadingManager",)
"""Classes of vLLM's offloading managers that do nothing at the end of a step."""


@dataclass(slots=True)
class Tier:
    """The scheduler's side of one OffloadingConnector."""

    connector: OffloadingConnector
    _side: OffloadingConnectorScheduler
    nothing_to_copy: Callable[[], object]
    _stored: tuple[Rows | None, int] = (None, 0)

    def quiet(self, finished: Collection[str]) -> bool:
        """Whether no copy is under way or planned, and no request has ended since the connector was last called."""
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
    """Return the tier of a scheduler's connector, or None if there is no connector or one of another kind."""
    if type(connector).__name__ != "OffloadingConnector":
        return None
    offloading = cast("OffloadingConnector", connector)
    side = offloading.connector_scheduler
    if type(side.manager).__name__ not in MANAGERS or not side.config.offload_prompt_only:
        return None
    if side.config.supports_partial_tail:  # of a state inside a block, which the first decode step hands over
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

    def nothing() -> object:
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())

    return Tier(offloading, side, nothing)


def has_news(output: object) -> bool:
    """Whether a worker's KVConnectorOutput reports anything."""
    is_empty: Callable[[], bool] | None = getattr(output, "is_empty", None)
    return output is not None and (is_empty is None or not is_empty())
