"""The core's steady-decode path of one scheduler, as the fast steppers use it. Simulator's process only.

What the core adds to a scheduler and its KV cache manager (`core/steps`) is read and set here only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, TypeGuard, cast

from vllm.v1.core.sched.interface import PauseState

from kvtune.core.steps.api import NoopManager, SteadyDecodeScheduler
from kvtune.core.steps.steady import Cohort, Rows, gather, next_event
from kvtune.core.vllm_types import BlockIds, KVCacheBlocks
from kvtune.sim.vllm_types import CacheManager, EngineRequest, EngineScheduler

DEPTH = 2
"""Batches in flight at most, with asynchronous scheduling and no pipeline parallelism."""

Allocate = Callable[[EngineRequest], KVCacheBlocks | None]


class SteadyScheduler(SteadyDecodeScheduler, EngineScheduler, Protocol):
    """The simulator's scheduler, with the path."""


class SteadyPath:
    """`scheduler` must have the path (`available`)."""

    def __init__(self, scheduler: EngineScheduler) -> None:
        assert has_path(scheduler)
        self._scheduler = adopted = scheduler
        self.lockstep: Callable[[], Cohort | None] = adopted.find_steady_cohort
        """The cohort of all running requests, where the next step is a plain decode of them; else None."""
        self.allocate_due: Callable[[Cohort], list[BlockIds | None] | None] = adopted.allocate_steady_blocks
        """The block ids that each row gets in the cohort's next step; None where stock has to decide."""
        self._limits = adopted.steady_limits
        self.tier = adopted.steady_tier
        """Host memory behind the KV cache, where the engine offloads to it."""

    @property
    def off(self) -> bool:
        """Switched off for this engine, or since an error."""
        return bool(self._scheduler.steady_off)

    @property
    def must_wait(self) -> bool:
        """Stock's next step still has blocks to report, or the scheduler is paused."""
        return bool(self._scheduler.steady_placed) or self._scheduler._pause_state is not PauseState.UNPAUSED

    @property
    def placed(self) -> Collection[BlockIds]:
        """Blocks that were given out in a step that stock then has to decide."""
        return self._scheduler.steady_placed.values()

    @property
    def cohort(self) -> Cohort | None:
        return self._scheduler.steady_cohort

    @cohort.setter
    def cohort(self, cohort: Cohort | None) -> None:
        self._scheduler.steady_cohort = cohort

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are scheduled before the last one's tokens are known."""
        return self._scheduler.steady_runs_ahead

    def all_running(self) -> Cohort | None:
        """The cohort of all running requests, where each decodes one token a step; whoever waits is left out of it."""
        scheduler, cohort = self._scheduler, self.cohort
        room = min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)
        if self.off or self.must_wait or scheduler.kv_holding_waiting or len(scheduler.running) >= room:
            return None
        if self.tier is not None:  # each step looks up who waits, and copies may begin or end
            return None
        if cohort is None or not cohort.sync(scheduler.running) or not self.in_step(cohort):
            self.cohort = cohort = self.gather(scheduler.running) if scheduler.running else None
        return cohort

    def in_step(self, cohort: Cohort) -> bool:
        """Whether the rows still have as many tokens in flight as when the cohort was gathered."""
        return bool(cohort.rows.ids) and cohort.rows.requests[0].num_output_placeholders == cohort.ahead

    def gather(self, requests: list[EngineRequest]) -> Cohort | None:
        """A new cohort of these requests; None where one of them is no plain decode."""
        scheduler = self._scheduler
        gathered = gather(requests, self._limits, scheduler.max_model_len, scheduler.hash_block_size)
        return gathered if isinstance(gathered, Cohort) else None

    def next_event(self, request: EngineRequest, ahead: int) -> int:
        """Computed tokens of a decoding request at which its blocks need attention again; asked for anew."""
        forget_limits(self._scheduler.kv_cache_manager, request.request_id)
        return next_event(request, self._limits(request), ahead, self._scheduler.max_model_len)

    def decoded(self, rows: Rows) -> None:
        """Note that the last step decoded exactly these rows, for the scheduler's own bookkeeping."""
        scheduler = self._scheduler
        if rows is not scheduler.steady_last_rows:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(rows.ids)
            scheduler.steady_last_rows = rows

    def decoded_beside_others(self, rows: Rows) -> None:
        """Note that the last step decoded these rows and scheduled others, too."""
        self._scheduler.prev_step_scheduled_req_ids.update(rows.ids)
        self._scheduler.steady_last_rows = None


def has_path(scheduler: EngineScheduler) -> TypeGuard[SteadyScheduler]:
    return hasattr(scheduler, "steady_allocate")


def available(scheduler: EngineScheduler, *, batches: int) -> bool:
    """Whether this scheduler takes the steady path in an engine that has at most this many batches in flight."""
    if not has_path(scheduler) or scheduler.steady_off:
        return False
    return batches == (DEPTH if scheduler.steady_runs_ahead else 1)


def remembers_limits(manager: CacheManager) -> bool:
    """Whether the manager remembers up to which token each request needs nothing of it."""
    return hasattr(manager, "noop_limits")


def forget_limits(manager: CacheManager, request_id: str) -> None:
    cast(NoopManager, manager).noop_limits.pop(request_id, None)


def replace_allocation(scheduler: EngineScheduler, allocate: Allocate) -> None:
    """Have the path ask `allocate` for the blocks of a request whose limits were reached."""
    if has_path(scheduler):
        scheduler.steady_allocate = allocate


def allocation_of(scheduler: EngineScheduler) -> Allocate | None:
    """What the path asks for blocks; None for a scheduler without it."""
    return scheduler.steady_allocate if has_path(scheduler) else None
