"""The steady-decode path of `schedule`: steps that only decode, at a fraction of stock's cost. Runs in EngineCore.

Contract: each step schedules the same requests and hands out the same blocks as stock would. A step is checked and its
output is made before anything is changed but the blocks of rows, which stock's output reports if stock has to schedule
the step. One that is not a plain decode goes to `super()`. After an exception in the core the scheduler gets vLLM's own
class back at its next call.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import RequestStatus

from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import breaker_of
from kvtune.plugin.core.steps import empty
from kvtune.plugin.core.steps.steady import Cohort, Rows, gather, is_plain_decode, next_event
from kvtune.plugin.core.steps.tier import tier_of
from kvtune.plugin.core.steps.update import SteadyUpdate
from kvtune.plugin.vllm.names import count_step, holds_prefills
from kvtune.plugin.vllm.types import BlockIds, KVCacheBlocks, Request


class Planned(NamedTuple):
    """A step that only decodes, before it is scheduled. `prefill_bound`: vLLM's flag of that name; None keeps it."""

    output: SchedulerOutput
    cohort: Cohort
    rows: Rows
    prefill_bound: bool | None


class SteadyDecode(SteadyUpdate):
    """Mixin for Scheduler and AsyncScheduler: `schedule` with the steady-decode path."""

    def adopt_steady(self, why_not: str) -> None:
        """Set up the path in a scheduler that vLLM has built. `why_not`: why it can never be taken, or empty."""
        self.steady_off = why_not
        self.steady_stock_class = next(
            base for base in type(self).__mro__ if base.__module__.startswith("vllm.")
        )
        self.steady_steps = 0
        self.steady_placed = {}
        self._allocating: tuple[str, list[int]] | None = None
        """The row whose blocks are being allocated, and how many each group had before."""
        self._other: Request | None = None  # a running request that was not a plain decode when last checked
        self.steady_last_rows = None
        self._in_flight = deque()
        self._order = ([], None, None)
        self.steady_cohort = None
        self.steady_breaker = breaker_of(self.kv_cache_manager)
        self.steady_breaker.on_trip(self.stand_down)
        self.steady_runs_ahead = isinstance(self, AsyncScheduler)
        manager = self.kv_cache_manager
        self._groups = manager.coordinator.single_type_managers
        self.steady_limits: Callable[[Request], empty.NoopLimits] = getattr(
            manager, "limits_of", None
        ) or functools.partial(empty.noop_limits, manager)
        self.steady_allocate: Callable[[Request], KVCacheBlocks | None] = getattr(
            manager, "allocate_at_event", None
        ) or functools.partial(manager.allocate_slots, num_new_tokens=1)
        self.steady_tier = tier_of(self.connector)
        state.part("steady", not self.steady_off, self.steady_off)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not (throttle_prefills or self.steady_off):
            planned = self.steady_breaker.attempt(self._plan)
            if planned is not None:
                self._commit(planned)
                return planned.output
        if self.steady_breaker.tripped:
            self._note_unrecorded()
        if self.steady_breaker.tripped and not self.steady_placed:
            self.__class__ = self.steady_stock_class
            stocks: SchedulerOutput = self.schedule(throttle_prefills)
            return stocks
        self.steady_cohort = None
        if not self.running:
            self.steady_breaker.attempt(self._forget_rows)
        output: SchedulerOutput = super().schedule(throttle_prefills)
        if self.steady_placed:
            self.steady_breaker.attempt(self._report_placed, output)
        return output

    def _plan(self) -> Planned | None:
        """Return this step if it only decodes, else None. Changes nothing but the blocks of rows: `steady_placed`."""
        cohort = self.find_steady_cohort()
        new_blocks = None if cohort is None else self._allocate_due(cohort)
        return None if cohort is None or new_blocks is None else self._planned(cohort, new_blocks)

    def _forget_rows(self) -> None:
        """Drop the references to the last steady step's requests; called when no request runs."""
        self._other = None
        self.steady_last_rows = None
        self._order = ([], None, None)

    def find_steady_cohort(self) -> Cohort | None:
        """Return all running requests if this step decodes one token of each and can admit no other, else None."""
        tier = self.steady_tier
        # A connector may be bound after the scheduler was built.
        if self.connector is not (None if tier is None else tier.connector):
            return None
        if tier is not None and not tier.quiet(self.finished_req_ids):
            return None
        cohort = self._find_cohort()
        return None if cohort is None or (tier is not None and not tier.has_offered(cohort.rows)) else cohort

    def most_step_tokens(self) -> int:
        return int(min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens))

    def _find_cohort(self) -> Cohort | None:
        running = self.running
        count = len(running)
        if not 0 < count <= self.most_step_tokens():
            return None
        if self._pause_state is not PauseState.UNPAUSED or self.steady_placed:
            return None
        # Blocks that are freed later come back between steps; an output connector may be bound after the scheduler was
        # built.
        if self.deferred_frees or self.aux_output_connector is not None:
            return None
        # Without async scheduling, a step's tokens must have arrived before the next step is scheduled.
        if self._in_flight and not self.steady_runs_ahead:
            return None
        if (self.waiting or self.kv_holding_waiting) and (
            count + self.num_waiting_for_streaming_input < self.max_num_active_reqs
        ):
            return None
        cohort = self.steady_cohort
        if (
            cohort is not None
            and cohort.sync(running)
            and cohort.rows.ids
            and cohort.rows.requests[0].num_output_placeholders == cohort.ahead
        ):
            return cohort
        return self._gather()

    def _gather(self) -> Cohort | None:
        other = self._other
        if (
            other is not None
            and other.status == RequestStatus.RUNNING
            and not is_plain_decode(other, other.num_output_placeholders)
        ):
            return None
        cohort = gather(self.running, self.steady_limits, self.max_model_len, self.hash_block_size)
        self._other = None if isinstance(cohort, Cohort) else cohort
        if not isinstance(cohort, Cohort) or (cohort.ahead and not self.steady_runs_ahead):
            return None
        if self.use_v2_model_runner:
            step = self.current_step + 1
            if any(request.next_decode_eligible_step > step for request in self.running):
                return None
        elif not self.prev_step_scheduled_req_ids.issuperset(cohort.rows.ids):
            return None
        self.steady_cohort = cohort
        return cohort

    def _allocate_due(self, cohort: Cohort) -> list[BlockIds | None] | None:
        """Allocate what the rows need in this step. `steady_placed` has it until the step is scheduled."""
        tick = cohort.scheduled + 1
        due = (cohort.due <= tick).nonzero()[0]
        if not due.size:
            return [None] * len(cohort.rows)
        rows, ahead = cohort.rows, cohort.ahead
        events: list[tuple[int, Request]] = []
        done: list[int] = []
        needed = 0
        for i in due.tolist():
            request = rows.requests[i]
            computed = request.num_computed_tokens
            if computed >= self.max_model_len - 1 or (
                ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
            ):
                done.append(i)
                continue
            events.append((i, request))
            if computed >= self.steady_limits(request).slots:
                needed += len(self._groups)
        if needed > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        if done and (not ahead or len(done) == len(rows)):
            return None
        self.kv_cache_manager.new_step_starts()
        new_blocks: list[BlockIds | None] = [None] * len(rows)
        for i, request in events:
            name = request.request_id
            self._allocating = name, [len(group.req_to_blocks.get(name, ())) for group in self._groups]
            blocks = self.steady_allocate(request)
            if blocks is None:
                return None
            new_blocks[i] = block_ids = blocks.get_block_ids(allow_none=True)
            if block_ids is not None:
                self.steady_placed[name] = block_ids
            self._allocating = None
            event = next_event(request, self.steady_limits(request), ahead, self.max_model_len)
            cohort.due[i] = tick + max(1, event - request.num_computed_tokens)
        if done:
            # Their last token is in flight: they stay running, but are not scheduled again.
            cohort.drop(done)
            for i in reversed(done):
                del new_blocks[i]
        return new_blocks

    def _note_unrecorded(self) -> None:
        """After an error, add to `steady_placed` the blocks of the row whose allocation was not recorded."""
        if self._allocating is None:
            return
        request_id, counts = self._allocating
        self._allocating = None
        new = tuple(
            [block.block_id for block in group.req_to_blocks.get(request_id, ())[count:]]
            for group, count in zip(self._groups, counts, strict=True)
        )
        if request_id not in self.steady_placed and any(new):
            self.steady_placed[request_id] = new

    def _planned(self, cohort: Cohort, new_blocks: list[BlockIds | None]) -> Planned:
        """Make the output of a step that schedules one token of every row. The blocks are allocated."""
        rows = cohort.rows
        computed = [request.num_computed_tokens for request in rows.requests]
        ahead = cohort.ahead if self.steady_runs_ahead else 0
        produced = [len(output) + ahead for output in rows.outputs]
        encoder_stats = None
        if self.log_stats and self.observability_config.enable_logging_iteration_details:
            encoder_stats = self._make_scheduled_encoder_input_stats({})
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=rows.ids.copy(),
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_blocks,
                num_computed_tokens=computed,
                num_output_tokens=produced,
            ),
            num_scheduled_tokens=rows.one_each.copy(),
            total_num_scheduled_tokens=len(rows),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            scheduled_encoder_input_stats=encoder_stats,
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
        )
        if self.steady_tier is not None:
            output.kv_connector_metadata = self.steady_tier.nothing_to_copy()
        bound = None
        if not holds_prefills(self):
            bound = self.get_request_counts()[1] > len(self.deferred_waiting)
        return Planned(output, cohort, rows, bound)

    def _commit(self, planned: Planned) -> None:
        """Advance the requests and the counters by the planned step, and let vLLM hand over what it has kept for it."""
        output, cohort, rows, bound = planned
        self.steady_placed.clear()
        self.current_step += 1
        cohort.scheduled += 1
        if not self.use_v2_model_runner and rows is not self.steady_last_rows:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(rows.ids)
        self.steady_last_rows = rows
        for request in rows.requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        if self.defer_block_free:  # a request's blocks are freed when its last step is done
            self.sched_step_seq += 1
            for request in rows.requests:
                request.last_sched_seq = self.sched_step_seq
        if self.steady_runs_ahead:
            eligible = self.current_step + self.decode_stagger
            for request in rows.requests:
                request.num_output_placeholders += 1
                if self.use_v2_model_runner:
                    request.next_decode_eligible_step = eligible
        if bound is not None:
            self.prefill_capacity_bound = bound
        count_step(self)
        # As stock in every step. Otherwise hand-offs to a connector, which are not used here, would pile up.
        self.kv_cache_manager.take_boundary_state_offloads()
        output.free_encoder_mm_hashes = self.encoder_cache_manager.get_freed_mm_hashes()
        output.new_block_ids_to_zero = self._get_new_block_ids_to_zero()
        output.ec_manager_metadata = self.encoder_cache_manager.get_manager_metadata()
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()
        self._in_flight.append((output, cohort, rows))
        self.steady_steps += 1

    def count_decoded(self, requests: Sequence[Request], steps: int) -> None:
        """Count steps that were scheduled and updated. For the simulator, which makes them itself."""
        if self.defer_block_free:
            self.sched_step_seq += steps
            self.processed_step_seq += steps
            for request in requests:
                request.last_sched_seq = self.sched_step_seq

    def _report_placed(self, output: SchedulerOutput) -> None:
        """Add to stock's output the blocks that the path had already allocated in this step."""
        data = output.scheduled_cached_reqs
        for request_id, block_ids in list(self.steady_placed.items()):
            request = self.requests.get(request_id)
            if request is None or request.status != RequestStatus.RUNNING:
                del self.steady_placed[request_id]
            elif request_id in output.num_scheduled_tokens:
                i = data.req_ids.index(request_id)
                more = data.new_block_ids[i] or tuple([] for _ in block_ids)
                data.new_block_ids[i] = tuple(a + b for a, b in zip(block_ids, more, strict=True))
                del self.steady_placed[request_id]
