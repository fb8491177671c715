"""Steps that also prefill, stop or leave requests waiting: plain decodes are set aside. Simulator's process only.

Plain decode steps are strides. In the others, the requests at the head of `running` that only decode take their token,
and the block they may need, as the core's steady-decode path gives it; then the engine's own scheduler decides about
all others with what is left of the budgets. It looks at requests in that order, so blocks, hits, admissions and
preemptions are those of one pass over all of them. A request that stops is updated by the engine itself.
With asynchronous scheduling a turn updates the batch before the one that it sends (`in_flight.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput as VllmSchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from kvtune.core.steps.steady import Cohort, Rows, carries_extras, is_finished, is_plain_decode
from kvtune.core.vllm_types import BlockIds
from kvtune.sim.executor import NONE_SET_ASIDE, SetAside
from kvtune.sim.fast.in_flight import Aside, InFlight, with_rows
from kvtune.sim.fast.steady_path import SteadyPath
from kvtune.sim.fast.stride import StrideStepper
from kvtune.sim.steps import BulkStep, DecodedRows, StepResult
from kvtune.sim.vllm_types import (
    EngineCore,
    EngineRequest,
    EngineScheduler,
    ModelOutput,
    Outputs,
    ScheduledStep,
    SchedulerOutput,
)

if TYPE_CHECKING:
    from kvtune.sim.clock import VirtualClock
    from kvtune.sim.fast.blocked import Jumper
    from kvtune.sim.journal import ReplayJournal

FEWEST = 2
"""Requests that are worth setting aside."""


class MixedStepper:
    """Makes one such step, or a stride."""

    def __init__(
        self,
        engine: EngineCore,
        path: SteadyPath,
        strider: StrideStepper,
        clock: VirtualClock,
        journal: ReplayJournal,
        jumper: Jumper | None,
        in_flight: InFlight | None = None,
    ) -> None:
        scheduler = engine.scheduler
        self._scheduler, self._path, self._strider = scheduler, path, strider
        self._in_flight, self._ahead = in_flight, 0 if in_flight is None else 1
        self._clock, self._journal, self._jumper = clock, journal, jumper
        self._executor = engine.model_executor
        self._schedule: Callable[[], SchedulerOutput] = partial(Scheduler.schedule, scheduler)
        self._update: Callable[..., Outputs] = partial(Scheduler.update_from_output, scheduler)
        self._indexes: tuple[Rows | None, list[int], NDArray[np.int64]] = (None, [], np.empty(0, "i8"))
        self._checked: Rows | None = None

    def try_step(self) -> StepResult | None:
        result = self._try_step()
        if result is None and self._in_flight is not None:
            self._in_flight.complete()  # another stepper makes this turn
        return result

    def _try_step(self) -> StepResult | None:
        path, running = self._path, self._scheduler.running
        if path.off or path.must_wait or len(running) < FEWEST:
            return None
        if self._in_flight is not None and not self._in_flight.one:
            return None
        cohort = self._decoding()
        if cohort is None or len(cohort.rows) < FEWEST:
            return None
        if len(cohort.running) == len(running):
            return self._step_where_all_decode(cohort)
        result = self._step(cohort, self._schedule_others)
        self._tell_jumper()
        return result

    def _step_where_all_decode(self, cohort: Cohort) -> StepResult | None:
        scheduler = self._scheduler
        waiting = len(scheduler.waiting)
        if not waiting and not scheduler.kv_holding_waiting:
            result = self._strider.try_step() or self._step(cohort, self._schedule_none)
            self._tell_jumper()
            return result
        if self._jumper is not None and self._jumper.blocked:
            return None
        before = (len(scheduler.running), waiting)
        result = self._step(cohort, self._schedule_others)
        after = (len(scheduler.running), len(scheduler.waiting))
        self._tell_jumper(blocked=result is not None and after == before)
        return result

    def _tell_jumper(self, blocked: bool = False) -> None:
        if self._jumper is not None:
            self._jumper.note_blocked(blocked)

    def _decoding(self) -> Cohort | None:
        """The running requests, from the first on, that are plain decodes; kept by the scheduler from step to step."""
        running, path = self._scheduler.running, self._path
        cohort = path.cohort
        if cohort is not None:
            alive = [request for request in cohort.running if not is_finished(request)]
            if (
                not alive
                or running[: len(alive)] != alive
                or not cohort.sync(alive)
                or not path.in_step(cohort)
            ):
                cohort = None
        begin = len(cohort.running) if cohort is not None else 0
        more = list(takewhile(self._only_decodes, running[begin:]))
        if more:
            gathered = path.gather(more)
            if gathered is None:
                return None
            cohort = gathered if cohort is None else _join(cohort, gathered)
        if cohort is not None and cohort.rows is not self._checked:
            if cohort.stop_table is not None or cohort.rows.eos.max() >= 0:
                cohort = None
            else:
                self._checked = cohort.rows
        path.cohort = cohort
        return cohort

    def _only_decodes(self, request: EngineRequest) -> bool:
        return is_plain_decode(request, self._ahead) and not carries_extras(request)

    def _step(self, cohort: Cohort, schedule: Callable[[Cohort], SchedulerOutput]) -> StepResult | None:
        executor, ahead, tier = self._executor, self._in_flight, self._path.tier
        if tier is not None and not tier.has_offered(cohort.rows):
            return None
        blocks = self._path.allocate_due(cohort) if len(cohort.rows) < self._room() else None
        if tier is not None:
            tier.given_out(self._path.placed if blocks is None else blocks)
        if blocks is None:
            self._path.cohort = None
            return None
        rows = cohort.rows
        begun = [request.num_computed_tokens for request in rows.requests]
        output = schedule(cohort)
        cohort.scheduled += 1
        for request in rows.requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self._ahead
        whole = _whole_step(rows, begun, blocks, output) if self._journal.keeps_digests else None
        executor.set_aside = SetAside(len(rows), sum(begun), whole)
        future = executor.execute_model(output)
        executor.set_aside = NONE_SET_ASIDE
        self._path.decoded_beside_others(rows)
        if ahead is None:
            return self._update_all(cohort, rows, output, future.result())
        done, output, aside = ahead.launch(future, Aside(output, cohort, rows))
        if aside is not None and aside.cohort is cohort:
            return self._update_all(cohort, aside.rows, output, done.result())
        result = done.result()
        if aside is not None:
            result = with_rows(aside.rows, range(len(aside.rows)), output, result)
        return StepResult(self._scheduler.update_from_output(output, result), True)

    def _update_all(
        self, cohort: Cohort, rows: Rows, output: SchedulerOutput, result: ModelOutput
    ) -> StepResult:
        """Update a batch, of which the rows were set aside, with the engine's result for the others."""
        stopping = (rows.stop_at <= cohort.updated + 1).nonzero()[0].tolist()
        self._append(cohort, rows, set(stopping))
        if stopping:
            result = with_rows(rows, stopping, output, result)
        return StepResult(self._update(output, result), True)

    def _room(self) -> int:
        scheduler = self._scheduler
        return min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)

    def _schedule_others(self, cohort: Cohort) -> SchedulerOutput:
        """The engine's own pass over the running requests behind the cohort, and over the waiting ones.

        The cohort's rows are scheduled; more of it are running where a last token is still in flight.
        """
        scheduler, config, count = self._scheduler, self._scheduler.scheduler_config, len(cohort.rows)
        running, tokens = scheduler.running, scheduler.max_num_scheduled_tokens
        inputs, active = config.max_num_batched_tokens, scheduler.max_num_active_reqs
        head = len(cohort.running)
        scheduler.running = running[head:]
        scheduler.max_num_scheduled_tokens = tokens - count
        config.max_num_batched_tokens = inputs - count
        scheduler.max_num_active_reqs = active - head
        try:
            return self._schedule()
        finally:
            scheduler.running = running[:head] + scheduler.running
            scheduler.max_num_scheduled_tokens = tokens
            config.max_num_batched_tokens = inputs
            scheduler.max_num_active_reqs = active

    def _schedule_none(self, cohort: Cohort) -> SchedulerOutput:
        scheduler = self._scheduler
        scheduler.current_step += 1
        empty: SchedulerOutput = VllmSchedulerOutput.make_empty()
        if (tier := self._path.tier) is not None:
            empty.finished_req_ids = scheduler.finished_req_ids
            empty.preempted_req_ids = scheduler.reset_preempted_req_ids
            empty.kv_connector_metadata = tier.connector.build_connector_meta(empty)
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
        scheduler.prev_step_scheduled_req_ids.clear()
        return empty

    def _append(self, cohort: Cohort, rows: Rows, stopping: set[int]) -> None:
        """Give each row its token, except those that the engine updates because they stop."""
        journal = self._journal
        columns = zip(rows.requests, rows.outputs, rows.all_tokens, strict=True)
        for i, (request, output, tokens) in enumerate(columns):
            if i not in stopping:
                output.append(0)
                tokens.append(0)
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= self._ahead
        for i in cohort.completing_blocks(rows).tolist():
            if i not in stopping:
                rows.requests[i].update_block_hashes()
        cohort.updated += 1
        known, indexes, places = self._indexes
        if known is not rows:
            indexes = [int(name) for name in rows.ids]
            places = np.array(indexes)
            self._indexes = (rows, indexes, places)
        if journal.keeps_tokens:
            journal.token_request.extend(indexes)
            journal.token_s.extend([self._clock.now_s] * len(indexes))
        journal.output[places] += 1
        for i in stopping:
            journal.output[indexes[i]] -= 1  # the engine's own output counts it
            journal.tokens_written.add(indexes[i])


def schedules_in_order(scheduler: EngineScheduler) -> bool:
    """Whether this scheduler looks at running requests in their order, each for itself.

    With states in align mode it does not: a chunk is cut by the whole step's budget, and a request that would hit a
    state from this very step waits.
    """
    return bool(
        scheduler.policy is SchedulingPolicy.FCFS
        and not scheduler.need_mamba_block_aligned_split
        and not scheduler.scheduler_config.long_prefill_token_threshold
        and not scheduler.kv_cache_manager.watermark_blocks
    )


def _join(cohort: Cohort, more: Cohort) -> Cohort:
    """`cohort` with the rows of a newly gathered one appended, converted to the clocks of `cohort`.

    The new rows' clocks begin when all that is in flight is updated: `cohort.updated` is then `cohort.scheduled`.
    """
    one, other = cohort.rows, more.rows
    phase = other.hash_phase
    phase = np.where(phase >= 0, (phase - cohort.scheduled) % cohort.hash_size, phase)
    cohort.rows = Rows(
        one.requests + other.requests,
        np.concatenate((one.eos, other.eos)),
        np.concatenate((one.stop_at, other.stop_at + cohort.scheduled)),
        np.concatenate((one.hash_phase, phase)),
        fresh=False,
    )
    cohort.due = np.concatenate((cohort.due, more.due + cohort.scheduled))
    cohort.running = cohort.running + more.running
    cohort.stop_table = more.stop_table if cohort.stop_table is None else cohort.stop_table
    return cohort


def _whole_step(
    rows: Rows, begun: list[int], blocks: Sequence[BlockIds | None], output: SchedulerOutput
) -> ScheduledStep:
    """What `digest` reads of a step: the rows set aside and what was scheduled, as one."""
    cached = output.scheduled_cached_reqs
    return BulkStep(
        {**rows.one_each, **output.num_scheduled_tokens},
        output.scheduled_new_reqs,
        DecodedRows([*blocks, *cached.new_block_ids], [*begun, *cached.num_computed_tokens]),
    )
