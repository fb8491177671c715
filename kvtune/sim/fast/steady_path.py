"""The core's steady-decode path of one scheduler, as the fast steppers use it. Simulator's process only.

The only module of the simulator that reads or sets what is private to `kvtune.core.steps` and to vLLM's pause state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from kvtune.core.steps.empty import Quiet
from kvtune.core.steps.steady import PREEMPTED, Cohort, Rows, gather, next_event
from kvtune.sim.vllm_types import CacheManager, EngineRequest, EngineScheduler


class SteadyPath:
    """`scheduler` must have the path (`available`)."""

    def __init__(self, scheduler: EngineScheduler) -> None:
        adopted: Any = scheduler
        self._scheduler: Any = adopted
        self.lockstep: Callable[[], Cohort | None] = adopted._lockstep
        """The cohort of all running requests, where the next step is a plain decode of them; else None."""
        self.allocate_due: Callable[[Cohort], list[Any] | None] = adopted._at_events
        """The block ids that each row gets in the cohort's next step; None where stock has to decide."""
        self.quiet: Callable[[EngineRequest], Quiet] = adopted._quiet

    @property
    def off(self) -> bool:
        """Switched off for this engine, or since an error."""
        return bool(self._scheduler.steady_off)

    @property
    def must_wait(self) -> bool:
        """Stock's next step still has blocks to report, or the scheduler is paused."""
        return bool(self._scheduler._placed) or self._scheduler._pause_state is not PauseState.UNPAUSED

    @property
    def cohort(self) -> Cohort | None:
        cohort: Cohort | None = self._scheduler._cohort
        return cohort

    @cohort.setter
    def cohort(self, cohort: Cohort | None) -> None:
        self._scheduler._cohort = cohort

    def gather(self, requests: list[EngineRequest]) -> Cohort | None:
        """A new cohort of these requests; None where one of them is no plain decode."""
        scheduler = self._scheduler
        gathered = gather(requests, self.quiet, scheduler.max_model_len, scheduler.hash_block_size)
        return gathered if isinstance(gathered, Cohort) else None

    def next_event(self, request: EngineRequest) -> int:
        """Computed tokens of a decoding request at which its blocks need attention again; asked for anew."""
        forget_quiet(self._scheduler.kv_cache_manager, request.request_id)
        return next_event(request, self.quiet(request), 0, self._scheduler.max_model_len)

    def decoded(self, rows: Rows) -> None:
        """Note that the last step decoded exactly these rows, for the scheduler's own bookkeeping."""
        scheduler = self._scheduler
        if rows is not scheduler._last_rows:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(rows.ids)
            scheduler._last_rows = rows

    def decoded_beside_others(self, rows: Rows) -> None:
        """Note that the last step decoded these rows and scheduled others, too."""
        self._scheduler.prev_step_scheduled_req_ids.update(rows.ids)
        self._scheduler._last_rows = None


def available(scheduler: EngineScheduler) -> bool:
    """Whether this scheduler takes the steady path, and schedules no step before the last one's tokens are known."""
    adopted: Any = scheduler
    off = getattr(adopted, "steady_off", "a scheduler without the path")
    return not off and not adopted._runs_ahead


def unfinished(requests: list[EngineRequest]) -> list[EngineRequest]:
    return [request for request in requests if request.status <= PREEMPTED]


def remembers_quiet(manager: CacheManager) -> bool:
    """Whether the manager keeps the limits until which a request needs nothing of it."""
    return hasattr(manager, "_quiet")


def forget_quiet(manager: Any, request_id: str) -> None:
    manager._quiet.pop(request_id, None)


def replace_allocation(scheduler: Any, allocate: Callable[[EngineRequest], Any]) -> None:
    """Have the path ask `allocate` for the blocks of a request whose limits were reached."""
    scheduler._allocate = allocate


def allocation_of(scheduler: Any) -> Callable[[EngineRequest], Any] | None:
    """What the path asks for blocks; None for a scheduler without it."""
    allocate: Callable[[EngineRequest], Any] | None = getattr(scheduler, "_allocate", None)
    return allocate
