"""The core's steady-decode path of one scheduler, as the fast steppers use it. Simulator's process only.

What the core adds to a scheduler and its KV cache manager (`core/steps`) is read and set here only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard, cast

from kvtune.core.steps.api import NoopManager, SteadyDecodeScheduler
from kvtune.core.steps.steady import Cohort, Rows, next_event
from kvtune.vllm.types import BlockIds, KVCacheBlocks, KVCacheManager, Request, Scheduler

DEPTH = 2
"""The most batches in flight with asynchronous scheduling and without pipeline parallelism."""

Allocate = Callable[[Request], KVCacheBlocks | None]


class SteadyScheduler(SteadyDecodeScheduler, Scheduler, Protocol):
    """The simulator's scheduler, with the path."""


class SteadyPath:
    """`scheduler` must have the path (`available`)."""

    def __init__(self, scheduler: Scheduler) -> None:
        assert has_path(scheduler)
        self._scheduler = adopted = scheduler
        self.lockstep: Callable[[], Cohort | None] = adopted.find_steady_cohort
        """The cohort of all running requests if the next step is a plain decode of them, else None."""
        self.allocate_due: Callable[[Cohort], list[BlockIds | None] | None] = adopted.allocate_steady_blocks
        """The block ids that each row gets in the cohort's next step; None if stock has to decide the step."""
        self._limits = adopted.steady_limits

    @property
    def off(self) -> bool:
        """Whether the path is switched off, for this engine or since an error."""
        return bool(self._scheduler.steady_off)

    def next_event(self, request: Request, ahead: int) -> int:
        """Computed tokens of a decoding request at which its blocks need attention again, computed anew."""
        forget_limits(self._scheduler.kv_cache_manager, request.request_id)
        return next_event(request, self._limits(request), ahead, self._scheduler.max_model_len)

    def decoded(self, rows: Rows) -> None:
        """Note that the last step decoded exactly these rows, for the scheduler's own bookkeeping."""
        scheduler = self._scheduler
        if rows is not scheduler.steady_last_rows:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(rows.ids)
            scheduler.steady_last_rows = rows


def has_path(scheduler: Scheduler) -> TypeGuard[SteadyScheduler]:
    return hasattr(scheduler, "steady_allocate")


def available(scheduler: Scheduler, *, batches: int) -> bool:
    """Whether this scheduler takes the steady path in an engine that has at most this many batches in flight."""
    if not has_path(scheduler) or scheduler.steady_off:
        return False
    return batches == (DEPTH if scheduler.steady_runs_ahead else 1)


def remembers_limits(manager: KVCacheManager) -> bool:
    """Whether the manager remembers until which token each request needs no blocks (`NoopSlots`)."""
    return hasattr(manager, "noop_limits")


def forget_limits(manager: KVCacheManager, request_id: str) -> None:
    cast(NoopManager, manager).noop_limits.pop(request_id, None)


def replace_allocation(scheduler: Scheduler, allocate: Allocate) -> None:
    """Make the path call `allocate` for the blocks of a request that has reached its limits."""
    if has_path(scheduler):
        scheduler.steady_allocate = allocate


def allocation_of(scheduler: Scheduler) -> Allocate | None:
    """The function that the path calls for blocks; None for a scheduler without the path."""
    return scheduler.steady_allocate if has_path(scheduler) else None
