"""Steps that also prefill, stop or leave requests waiting: plain decodes are set aside. Simulator's process only.

Plain decode steps are strides. In the others, the requests at the head of `running` that only decode take their token,
and the block they may need, as the core's steady-decode path gives it; then the engine's own scheduler decides about
all others with what is left of the budgets. It looks at requests in that order, so blocks, hits, admissions and
preemptions are those of one pass over all of them. A request that stops is updated by the engine itself.
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
from vllm.v1.outputs import ModelRunnerOutput

from kvtune.core.steps.steady import Cohort, Rows, carries_extras, is_finished, is_plain_decode
from kvtune.core.vllm_types import BlockIds
from kvtune.sim.executor import NONE_SET_ASIDE, SetAside
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
    from kvtune.sim.fast.jump import JumpStepper
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
        jumper: JumpStepper | None,
    ) -> None:
        scheduler = engine.scheduler
        self._scheduler, self._path, self._strider = scheduler, path, strider
        self._clock, self._journal, self._jumper = clock, journal, jumper
        self._executor = engine.model_executor
        self._schedule: Callable[[], SchedulerOutput] = partial(Scheduler.schedule, scheduler)
        self._update: Callable[..., Outputs] = partial(Scheduler.update_from_output, scheduler)
        self._indexes: tuple[Rows | None, list[int], NDArray[np.int64]] = (None, [], np.empty(0, "i8"))
        self._checked: Rows | None = None

    def try_step(self) -> StepResult | None:
        path, running = self._path, self._scheduler.running
        if path.off or path.must_wait or len(running) < FEWEST:
            return None
        cohort = self._decoding()
        if cohort is None or len(cohort.rows) < FEWEST:
            return None
        if len(cohort.rows) == len(running):
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
            if not alive or running[: len(alive)] != alive or not cohort.sync(alive):
                cohort = None
        begin = len(cohort.rows) if cohort is not None else 0
        more = list(takewhile(_only_decodes, running[begin:]))
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

    def _step(self, cohort: Cohort, schedule: Callable[[int], SchedulerOutput]) -> StepResult | None:
        rows, executor = cohort.rows, self._executor
        count = len(rows)
        begun = [request.num_computed_tokens for request in rows.requests]
        blocks = self._path.allocate_due(cohort) if count < self._room() else None
        if blocks is None:
            self._path.cohort = None
            return None
        output = schedule(count)
        cohort.scheduled += 1
        for request in rows.requests:
            request.num_computed_tokens += 1
        whole = _whole_step(rows, begun, blocks, output) if self._journal.keeps_digests else None
        executor.set_aside = SetAside(count, sum(begun), whole)
        result = executor.execute_model(output).result()
        executor.set_aside = NONE_SET_ASIDE
        stopping = (rows.stop_at <= cohort.updated + 1).nonzero()[0].tolist()
        self._append(cohort, set(stopping))
        if stopping:
            result = _with_rows(rows, stopping, output, result)
        self._path.decoded_beside_others(rows)
        return StepResult(self._update(output, result), True)

    def _room(self) -> int:
        scheduler = self._scheduler
        return min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)

    def _schedule_others(self, count: int) -> SchedulerOutput:
        """The engine's own pass over the running requests behind the first `count`, and over the waiting ones."""
        scheduler, config = self._scheduler, self._scheduler.scheduler_config
        running, tokens = scheduler.running, scheduler.max_num_scheduled_tokens
        inputs, active = config.max_num_batched_tokens, scheduler.max_num_active_reqs
        scheduler.running = running[count:]
        scheduler.max_num_scheduled_tokens = tokens - count
        config.max_num_batched_tokens = inputs - count
        scheduler.max_num_active_reqs = active - count
        try:
            return self._schedule()
        finally:
            scheduler.running = running[:count] + scheduler.running
            scheduler.max_num_scheduled_tokens = tokens
            config.max_num_batched_tokens = inputs
            scheduler.max_num_active_reqs = active

    def _schedule_none(self, count: int) -> SchedulerOutput:
        scheduler = self._scheduler
        scheduler.current_step += 1
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
        scheduler.prev_step_scheduled_req_ids.clear()
        empty: SchedulerOutput = VllmSchedulerOutput.make_empty()
        return empty

    def _append(self, cohort: Cohort, stopping: set[int]) -> None:
        """Give each row its token, but for those that the engine updates because they stop."""
        rows, journal = cohort.rows, self._journal
        for i, (output, tokens) in enumerate(zip(rows.outputs, rows.all_tokens, strict=True)):
            if i not in stopping:
                output.append(0)
                tokens.append(0)
        for i in cohort.completing_blocks(rows).tolist():
            if i not in stopping:
                rows.requests[i].update_block_hashes()
        for i in stopping:
            rows.requests[i].num_in_flight_tokens += 1
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


def _only_decodes(request: EngineRequest) -> bool:
    return is_plain_decode(request, 0) and not carries_extras(request)


def _join(cohort: Cohort, more: Cohort) -> Cohort:
    """`cohort` with the rows of a newly gathered one appended, converted to the clocks of `cohort`."""
    one, other = cohort.rows, more.rows
    phase = other.hash_phase
    phase = np.where(phase >= 0, (phase - cohort.updated) % cohort.hash_size, phase)
    cohort.rows = Rows(
        one.requests + other.requests,
        np.concatenate((one.eos, other.eos)),
        np.concatenate((one.stop_at, other.stop_at + cohort.updated)),
        np.concatenate((one.hash_phase, phase)),
        fresh=False,
    )
    cohort.due = np.concatenate((cohort.due, more.due + cohort.scheduled))
    cohort.running = cohort.running + more.running
    cohort.stop_table = more.stop_table if cohort.stop_table is None else cohort.stop_table
    return cohort


def _with_rows(rows: Rows, chosen: list[int], output: SchedulerOutput, result: ModelOutput) -> ModelOutput:
    """The model's output with the chosen rows in front, as the engine orders them; `output` has them added."""
    ids = [rows.ids[i] for i in chosen]
    output.num_scheduled_tokens = {**dict.fromkeys(ids, 1), **output.num_scheduled_tokens}
    output.total_num_scheduled_tokens += len(ids)
    names = ids + result.req_ids
    both: ModelOutput = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[0] for _ in ids] + result.sampled_token_ids,
    )
    return both


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
