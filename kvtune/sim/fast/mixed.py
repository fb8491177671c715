"""Steps in which somebody prefills, stops or waits in vain: who only decodes is set aside. Simulator's process only.

Plain decode steps are strides. In the others, the running requests that head the list and only decode take their token,
and the block they may need, as the core's steady-decode path gives it; then the engine's own scheduler decides about
all others with what is left of the budgets. That is the order in which it looks at them, so blocks, hits and who is
admitted or preempted are those of one pass over everybody; it does not look where nobody else is. Whoever stops is
updated by the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from kvtune.core.steps.steady import Cohort, Rows, carries_extras, gather, is_finished, is_plain_decode
from kvtune.sim.fast.stride import Strider

if TYPE_CHECKING:
    from kvtune.sim.clock import VirtualClock
    from kvtune.sim.fast.jump import Jumper
    from kvtune.sim.journal import ReplayJournal

FEWEST = 2
"""Requests that are worth setting aside."""


class Mixer:
    """`run` makes one such step, or a stride, and gives the engine's outputs; None where neither can be made."""

    def __init__(
        self,
        engine: Any,
        strider: Strider,
        clock: VirtualClock,
        journal: ReplayJournal,
        *,
        tokens: bool,
        digests: bool,
        jumper: Jumper | None,
    ) -> None:
        self._scheduler, self._strider, self._clock, self._journal = engine.scheduler, strider, clock, journal
        self._executor = engine.model_executor
        self._tokens, self._digests, self._jumper = tokens, digests, jumper
        scheduler = self._scheduler
        self._schedule = partial(Scheduler.schedule, scheduler)
        self._update = partial(Scheduler.update_from_output, scheduler)
        self._known: tuple[Any, list[int], Any] = (None, [], None)
        self._looked_at: Rows | None = None

    @staticmethod
    def can(engine: Any) -> bool:
        """Whether this engine's scheduler looks at running requests in their order, each for itself.

        With states in align mode it does not: a chunk is cut by the whole step's budget, and who would hit a state that
        is from this very step waits.
        """
        scheduler = engine.scheduler
        return bool(
            Strider.can(engine)
            and scheduler.policy is SchedulingPolicy.FCFS
            and not scheduler.need_mamba_block_aligned_split
            and not scheduler.scheduler_config.long_prefill_token_threshold
            and not scheduler.kv_cache_manager.watermark_blocks
        )

    def run(self) -> Any:
        scheduler = self._scheduler
        if (
            scheduler.steady_off
            or scheduler.steady_placed
            or scheduler._pause_state is not PauseState.UNPAUSED
            or len(scheduler.running) < FEWEST
        ):
            return None
        cohort = self._decoding()
        if cohort is None or len(cohort.rows) < FEWEST:
            return None
        jumper, plain = self._jumper, len(cohort.rows) == len(scheduler.running)
        waits = len(scheduler.waiting)
        if plain and not waits and not scheduler.kv_holding_waiting:
            found = {} if self._strider.run() else self._step(cohort, self._nobody_else)
        elif plain and jumper is not None and jumper.blocked:
            return None
        else:
            before = (len(scheduler.running), waits)
            found = self._step(cohort, self._schedule_others)
            if plain and found is not None and (len(scheduler.running), len(scheduler.waiting)) == before:
                if jumper is not None:
                    jumper.rest(blocked=True)
                return found
        if jumper is not None:
            jumper.rest()
        return found

    def _decoding(self) -> Cohort | None:
        """The running requests, from the first on, that are plain decodes; kept by the scheduler from step to step."""
        scheduler = self._scheduler
        running: list[Any] = scheduler.running
        cohort: Cohort | None = scheduler.steady_cohort
        if cohort is not None:
            alive = [request for request in cohort.running if not is_finished(request)]
            if not alive or running[: len(alive)] != alive or not cohort.sync(alive):
                cohort = None
        begin = len(cohort.rows) if cohort is not None else 0
        more = list(takewhile(_plain, running[begin:]))
        if more:
            found = gather(more, scheduler.steady_limits, scheduler.max_model_len, scheduler.hash_block_size)
            if not isinstance(found, Cohort):
                return None
            cohort = found if cohort is None else _join(cohort, found)
        if cohort is not None and cohort.rows is not self._looked_at:
            if cohort.stop_table is not None or cohort.rows.eos.max() >= 0:
                cohort = None
            else:
                self._looked_at = cohort.rows
        scheduler.steady_cohort = cohort
        return cohort

    def _step(self, cohort: Cohort, others: Callable[[int], Any]) -> Any:
        scheduler, rows = self._scheduler, cohort.rows
        count = len(rows)
        begun = [request.num_computed_tokens for request in rows.requests]
        blocks = scheduler.allocate_steady_blocks(cohort) if count < self._room() else None
        if blocks is None:
            scheduler.steady_cohort = None
            return None
        output = others(count)
        cohort.scheduled += 1
        for request in rows.requests:
            request.num_computed_tokens += 1
        if self._digests:
            self._executor.aside_digest = _whole(rows, begun, blocks, output)
        self._executor.aside = (count, sum(begun))
        result = self._executor.execute_model(output).result()
        self._executor.aside = (0, 0)
        stopping = (rows.stop_at <= cohort.updated + 1).nonzero()[0].tolist()
        self._append(cohort, set(stopping))
        if stopping:
            result = _with_rows(rows, stopping, output, result)
        scheduler.prev_step_scheduled_req_ids.update(rows.ids)
        scheduler.steady_last_rows = None
        return self._update(output, result)

    def _room(self) -> int:
        scheduler = self._scheduler
        config = scheduler.scheduler_config
        return int(min(scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens))

    def _schedule_others(self, count: int) -> Any:
        """The engine's own pass over the requests behind the first `count`, and over those that wait."""
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

    def _nobody_else(self, count: int) -> Any:
        scheduler = self._scheduler
        scheduler.current_step += 1
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
        scheduler.prev_step_scheduled_req_ids.clear()
        return SchedulerOutput.make_empty()

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
        known, indexes, places = self._known
        if known is not rows:
            indexes = [int(name) for name in rows.ids]
            places = np.array(indexes)
            self._known = (rows, indexes, places)
        if self._tokens:
            journal.token_request.extend(indexes)
            journal.token_s.extend([self._clock.now_s] * len(indexes))
        journal.output[places] += 1
        for i in stopping:
            journal.output[indexes[i]] -= 1  # the engine gives it
            journal.written.add(indexes[i])


def _plain(request: Any) -> bool:
    return is_plain_decode(request, 0) and not carries_extras(request)


def _join(cohort: Cohort, more: Cohort) -> Cohort:
    """`cohort` with the rows of a new one behind its own, on its own clocks."""
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


def _with_rows(rows: Rows, chosen: list[int], output: Any, result: Any) -> Any:
    """What was scheduled and made, with the chosen rows in front: so the engine would have come to them."""
    ids = [rows.ids[i] for i in chosen]
    output.num_scheduled_tokens = {**dict.fromkeys(ids, 1), **output.num_scheduled_tokens}
    output.total_num_scheduled_tokens += len(ids)
    names = ids + result.req_ids
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[0] for _ in ids] + result.sampled_token_ids,
    )


def _whole(rows: Rows, begun: list[int], blocks: list[Any], output: Any) -> Any:
    """What `digest` reads of the step as one."""
    cached = output.scheduled_cached_reqs
    return SimpleNamespace(
        num_scheduled_tokens={**rows.one_each, **output.num_scheduled_tokens},
        scheduled_new_reqs=output.scheduled_new_reqs,
        scheduled_cached_reqs=SimpleNamespace(
            new_block_ids=[*blocks, *cached.new_block_ids],
            num_computed_tokens=[*begun, *cached.num_computed_tokens],
        ),
    )
