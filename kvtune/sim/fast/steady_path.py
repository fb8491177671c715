"""The core's steady-decode path of one scheduler, as the fast steppers use it. Simulator's process only.

Only this module reads and sets the attributes that the core (`core/steps`) adds to a scheduler and its manager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard, cast

from kvtune.core.steps.empty import NoopLimits
from kvtune.core.steps.steady import Cohort, Rows, next_event
from kvtune.core.steps.tier import Tier
from kvtune.vllm.types import BlockIds, KVCacheBlocks, KVCacheManager, Request, Scheduler


class NoopManager(KVCacheManager, Protocol):
    """A KV cache manager with `NoopSlots`. Code that allocates by other means must drop the request's limits."""

    noop_limits: dict[str, NoopLimits]


class SteadyDecodeScheduler(Scheduler, Protocol):
    """A scheduler with `SteadyDecode`."""

    steady_off: str
    """Why the path is not taken; empty while it can be."""
    steady_runs_ahead: bool
    """Whether steps are scheduled before the last one's output is known (async scheduling)."""
    steady_cohort: Cohort | None
    steady_last_rows: Rows | None
    steady_placed: dict[str, BlockIds]
    steady_limits: Callable[[Request], NoopLimits]
    steady_tier: Tier | None
    steady_allocate: Callable[[Request], KVCacheBlocks | None]

    def count_decoded(self, rows: Rows, steps: int) -> None: ...
    def find_steady_cohort(self) -> Cohort | None: ...
    def allocate_steady_blocks(self, cohort: Cohort) -> list[BlockIds | None] | None: ...


DEPTH = 2
"""The most batches in flight with asynchronous scheduling and without pipeline parallelism."""

Allocate = Callable[[Request], KVCacheBlocks | None]


class SteadyScheduler(SteadyDecodeScheduler, Scheduler, Protocol):
    """The simulator's scheduler, with the steady-decode path."""


class SteadyPath:
    """Access to a scheduler's steady-decode path, which must be `available`."""

    def __init__(self, scheduler: Scheduler) -> None:
        assert has_path(scheduler)
        self._scheduler = adopted = scheduler
        self.lockstep: Callable[[], Cohort | None] = adopted.find_steady_cohort
        """Returns the cohort of all running requests if the next step only decodes one token of each, else None."""
        self.allocate_due: Callable[[Cohort], list[BlockIds | None] | None] = adopted.allocate_steady_blocks
        """Returns each request's new block ids in the next step; None if vLLM's scheduler must decide the step."""
        self._limits = adopted.steady_limits

    @property
    def off(self) -> bool:
        """Whether the path is switched off for this engine, or after an error."""
        return bool(self._scheduler.steady_off)

    def next_event(self, request: Request, ahead: int) -> int:
        """Return how many tokens a decoding request has computed when it next needs a block, a hash or a stop."""
        forget_limits(self._scheduler.kv_cache_manager, request.request_id)
        return next_event(request, self._limits(request), ahead, self._scheduler.max_model_len)

    def decoded(self, rows: Rows, steps: int) -> None:
        """Tell the scheduler that the last `steps` steps decoded exactly these rows."""
        scheduler = self._scheduler
        scheduler.count_decoded(rows, steps)
        if rows is not scheduler.steady_last_rows:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(rows.ids)
            scheduler.steady_last_rows = rows


def has_path(scheduler: Scheduler) -> TypeGuard[SteadyScheduler]:
    return hasattr(scheduler, "steady_allocate")


def available(scheduler: Scheduler, *, batches: int) -> bool:
    """Whether a scheduler can take the steady path. `batches`: the most batches that its engine has in flight."""
    if not has_path(scheduler) or scheduler.steady_off:
        return False
    return batches == (DEPTH if scheduler.steady_runs_ahead else 1)


def remembers_limits(manager: KVCacheManager) -> bool:
    """Whether the manager remembers up to which token each request needs no new block (`NoopSlots`)."""
    return hasattr(manager, "noop_limits")


def forget_limits(manager: KVCacheManager, request_id: str) -> None:
    cast(NoopManager, manager).noop_limits.pop(request_id, None)


def replace_allocation(scheduler: Scheduler, allocate: Allocate) -> None:
    """Make the steady path call `allocate` when a request needs a block."""
    if has_path(scheduler):
        scheduler.steady_allocate = allocate


def allocation_of(scheduler: Scheduler) -> Allocate | None:
    """Return the function that the steady path calls for blocks; None for a scheduler without the path."""
    return scheduler.steady_allocate if has_path(scheduler) else None
