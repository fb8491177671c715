"""vLLM's scheduler beside rows (`columns.py`), which it does not see. Simulator's process only.

The requests that only decode and come first in `running` are rows; vLLM's scheduler is shown the others, with the
tokens and the places that the rows leave. A row is settled before vLLM's code reads its request.

    schedule():            rows join; those due get blocks, in order; vLLM schedules all others
    update_from_output():  rows that end go to vLLM with all others; a token for each row

Few free blocks, priorities beside others, a pause, an abort: the rows are settled and leave, and the step is vLLM's.
Engines with states or a tier of host memory have rows only within a stride (`stride.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import cast

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import ModelRunnerOutput

from kvtune.lab.sim.fast.columns import DUE, INDEX, LAST, SLOTS, TOKENS, Columns, Dealer
from kvtune.lab.sim.fast.pool import QuickGroup, QuickWindow
from kvtune.lab.sim.fast.runs import RunPool
from kvtune.lab.sim.steps import BulkStep, Decoded, DecodedRows, Hidden, hidden_of
from kvtune.plugin.core.steps.empty import NEVER, NoopSlots, noop_limits
from kvtune.plugin.core.steps.schedule import SteadyDecode
from kvtune.plugin.core.steps.scheduler import SteadyAsyncScheduler, SteadyScheduler
from kvtune.plugin.core.steps.steady import carries_extras, is_plain_decode
from kvtune.plugin.core.steps.update import Outputs
from kvtune.plugin.vllm.types import BlockIds, Request, Scheduler, has_states, has_window


class Shown(list[Request]):
    """The running requests that vLLM's scheduler is shown, which is to know that there are others."""

    def __bool__(self) -> bool:
        return True


class ColumnDecode(SteadyDecode):
    """Mixin for the schedulers of the steady-decode path: requests that only decode are counted in columns."""

    columns: Columns
    dealer: Dealer
    decoded: Decoded | None
    """What the last update has added to rows, until a stepper takes it."""
    beside: bool
    """Whether rows are counted in steps of which vLLM schedules a part, too; else in strides alone."""

    def adopt_columns(self, *, digests: bool) -> None:
        """`digests`: a step's output also gets what the digest of all its rows is made of."""
        groups, pool = self._groups, self.kv_cache_manager.block_pool
        self._plain = isinstance(pool, RunPool) and all(
            type(group) in (QuickGroup, QuickWindow)
            and group.block_size == self.hash_block_size
            and not group._record_new_block_ids
            for group in groups
        )
        self._windows = [
            (group, group.sliding_window + group.extra_retained_tokens - 1)
            for group in groups
            if has_window(group)
        ]
        self.dealer = Dealer(pool, groups if self._plain and not self._windows else ())
        self.columns = Columns(int(self.steady_runs_ahead))
        self.decoded = None
        self._digests = digests
        states = any(map(has_states, self._groups))
        self.beside = self.connector is None and not (states or self.defer_block_free)
        self._hidden_requests = 0

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        return running + self._hidden_requests, waiting

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        columns = self.columns
        new_blocks = None if throttle_prefills or not self._follow() else self._place()
        if new_blocks is None:
            self.leave_columns()
            return super().schedule(throttle_prefills)
        columns.scheduled = going_on = columns.going_on()
        count, running = len(columns.names), self.running
        names = columns.names
        if not going_on.all():
            names = [name for name, goes in zip(names, going_on.tolist(), strict=True) if goes]
        computed = columns.computed()[going_on]
        self._hidden_requests = count
        self.running = Shown(running[count:])
        self.max_num_scheduled_tokens -= len(names)
        self.max_num_active_reqs -= count
        try:
            output: SchedulerOutput = VllmScheduler.schedule(self)
        finally:
            self._hidden_requests = 0
            self.running = running[:count] + self.running
            self.max_num_scheduled_tokens += len(names)
            self.max_num_active_reqs += count
        self.steady_cohort = self.steady_last_rows = None
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(names)
        output.total_num_scheduled_tokens += len(names)
        whole = None
        if self._digests:
            cached = output.scheduled_cached_reqs
            whole = BulkStep(
                dict.fromkeys(names, 1) | output.num_scheduled_tokens,
                output.scheduled_new_reqs,
                DecodedRows(
                    [*map(new_blocks.get, names), *cached.new_block_ids],
                    [*computed.tolist(), *cached.num_computed_tokens],
                ),
            )
        indexes = columns.table[INDEX, going_on]
        vars(output)["hidden"] = Hidden(columns.version, names, indexes, int(computed.sum()), whole)
        if columns.ahead:
            for request in columns.requests[columns.earlier :]:
                request.num_computed_tokens += 1
                request.num_in_flight_tokens += 1
                request.num_output_placeholders += 1
                self._set_eligible(request)
        return output

    def _follow(self) -> bool:
        """Let requests join that only decode. Return whether there are rows and vLLM may schedule beside them."""
        columns = self.columns
        if not (self.beside and self._may_count()):
            return False
        count = len(columns.requests)
        if columns.earlier is not None or self.running[:count] != columns.requests:
            self.leave_columns()
            count = 0
        rows: list[list[int]] = []
        for request in self.running[count:]:
            row = self._row_of(request)
            if row is None:
                break
            rows.append(row)
        columns.earlier = count
        if rows:
            columns.join(self.running[count : count + len(rows)], rows)
        if not columns.ahead:
            columns.earlier = len(columns.requests)
        alone = not self.waiting and len(self.running) == len(columns.requests)
        # By priority, vLLM may preempt a row.
        return bool(columns.requests) and (alone or self.policy is not SchedulingPolicy.PRIORITY)

    def _may_count(self) -> bool:
        tier = self.steady_tier
        return not (
            self.steady_off
            or self.steady_placed
            or self._pause_state is not PauseState.UNPAUSED
            or self.deferred_frees
            or self.connector is not (None if tier is None else tier.connector)
            or self.aux_output_connector is not None
        )

    def _row_of(self, request: Request) -> list[int] | None:
        """Return the row of a request that only decodes and does not end yet, else None."""
        ahead, sampling = self.columns.ahead, request.sampling_params
        tokens = len(request._all_token_ids)
        last = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        if (
            not is_plain_decode(request, ahead)
            or tokens + 1 >= last
            or sampling is None
            or sampling.eos_token_id is not None
            or sampling.stop_token_ids
            or request.next_decode_eligible_step > self.current_step + 1
            or (not ahead and carries_extras(request))
        ):
            return None
        if isinstance(self.kv_cache_manager, NoopSlots):
            self.kv_cache_manager.noop_limits.pop(request.request_id, None)
        return [tokens, last, *self.events(request), int(request.request_id)]

    def events(self, request: Request) -> tuple[int, int, int]:
        """Return SLOTS, CACHED and DUE of a row whose request is settled."""
        limits = noop_limits(self.kv_cache_manager, request)
        due = min(limits.slots + 1 - self.columns.ahead, limits.cached, limits.window + 1)
        return limits.slots, limits.cached, due

    def _place(self) -> dict[str, BlockIds | None] | None:
        """Give the rows that are due in the next step their blocks, as `place_rows` does."""
        columns, table = self.columns, self.columns.table
        going_on = columns.going_on()
        if not 0 < np.count_nonzero(going_on) <= self.max_num_scheduled_tokens:
            return None
        due = going_on & (table[TOKENS] >= table[DUE])
        dealt = self.dealer.deal(columns, 1, going_on) if due.any() else None
        if dealt is None:
            return self.place_rows(due.nonzero()[0].tolist())
        width = len(self._groups)
        return {
            columns.names[i]: tuple(
                [block.block_id] for block in dealt.blocks[number * width : (number + 1) * width]
            )
            for number, i in enumerate(dealt.rows if self._digests else ())
        }

    def place_rows(self, rows: Sequence[int]) -> dict[str, BlockIds | None] | None:
        """Give these rows their blocks, in order. Return the new blocks for digests.

        None, and no row has a block, if too few are free: vLLM must decide the step.
        """
        columns, table = self.columns, self.columns.table
        free, width = self.kv_cache_manager.block_pool.get_num_free_blocks(), len(self._groups)
        if width * len(rows) > free:
            needing = table[TOKENS, rows] + (columns.ahead - 1) >= table[SLOTS, rows]
            if width * np.count_nonzero(needing) > free:
                return None
        new_blocks: dict[str, BlockIds | None] = {}
        for i in rows:
            if self._plain:
                new_ids = self.place_row(i)
            else:
                if not self._has_just_joined(i):
                    self.settle(i, 0)
                blocks = self.steady_allocate(columns.requests[i])
                assert blocks is not None
                new_ids = blocks.get_block_ids(allow_none=True) if self._digests else None
                table[SLOTS : DUE + 1, i] = self.events(columns.requests[i])
            new_blocks[columns.names[i]] = new_ids
        return new_blocks

    def place_row(self, i: int) -> BlockIds | None:
        """Do for a row what vLLM's `allocate_slots` does: give back what has left its windows, take blocks, cache."""
        columns, manager, size = self.columns, self.kv_cache_manager, self.hash_block_size
        name, new_ids, ahead = columns.names[i], None, columns.ahead
        tokens, _, slots, cached, _, _ = columns.table[:, i].tolist()
        processed, due = tokens - 1, NEVER
        if self._has_just_joined(i):
            processed += ahead - columns.requests[i].num_in_flight_tokens
        for window, span in self._windows:
            gone = max(0, processed - span) // size
            if gone:
                window.remove_skipped_blocks(name, processed)
            due = min(due, (gone + 1) * size + span + 1)
        if tokens - 1 + ahead >= slots:
            new = [manager.block_pool.get_new_blocks(1) for _ in self._groups]
            for group, blocks in zip(self._groups, new, strict=True):
                group.req_to_blocks[name] += blocks
            new_ids = tuple([block.block_id] for (block,) in new)
            slots += size
        if tokens >= cached:
            if not self._has_just_joined(i):
                self.settle(i, 0)
            manager.coordinator.cache_blocks(columns.requests[i], tokens)
            cached = (tokens // size + 1) * size
        columns.table[SLOTS : DUE + 1, i] = slots, cached, min(slots + 1 - ahead, cached, due)
        return new_ids

    def _has_just_joined(self, i: int) -> bool:
        """Whether a row's request is as vLLM left it."""
        return self.columns.earlier is not None and i >= self.columns.earlier

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Outputs:
        columns = self.columns
        hidden = hidden_of(scheduler_output)
        ending: list[int] = []
        if hidden is not None:
            names = hidden.names
            if hidden.version == columns.version:
                table = columns.table[:, : len(names)]
                ending = (table[TOKENS] + 1 >= table[LAST]).nonzero()[0].tolist()
                for i in ending:
                    self.settle(i, 1 - columns.ahead)
                names = [names[i] for i in ending]
                self.decoded = Decoded(hidden.indexes, len(names))
            if names:
                scheduler_output.num_scheduled_tokens = (
                    dict.fromkeys(names, 1) | scheduler_output.num_scheduled_tokens
                )
                model_runner_output = _with_rows(names, model_runner_output)
        outputs: Outputs = super().update_from_output(scheduler_output, model_runner_output)
        columns.table[TOKENS] += 1
        columns.earlier = columns.scheduled = None
        if ending:
            columns.drop(ending)
        return outputs

    def finish_requests(self, *args: object, **options: object) -> object:
        self.leave_columns()
        return super().finish_requests(*args, **options)

    def reset_prefix_cache(self, *args: object, **options: object) -> object:
        self.leave_columns()
        return super().reset_prefix_cache(*args, **options)

    def leave_columns(self) -> None:
        """Settle all rows and let them leave: vLLM's code goes on with them."""
        columns = self.columns
        count = len(columns.requests) if columns.earlier is None else columns.earlier
        scheduled = [0] * count if columns.scheduled is None else columns.scheduled.tolist()
        for i in range(count):
            self.settle(i, int(scheduled[i]))
        columns.clear()

    def settle(self, i: int, scheduled: int) -> None:
        """Set the fields of a row's request. `scheduled`: tokens of a step whose output vLLM is to see next."""
        columns = self.columns
        request, tokens = columns.requests[i], int(columns.table[TOKENS, i])
        more = [0] * (tokens - len(request._all_token_ids))
        if more:
            request._output_token_ids.extend(more)
            request._all_token_ids.extend(more)
            request.update_block_hashes()
        in_flight = columns.ahead + scheduled
        request.num_computed_tokens = tokens - 1 + in_flight
        request.num_in_flight_tokens = in_flight
        if columns.ahead:
            request.num_output_placeholders = in_flight
            self._set_eligible(request)

    def _set_eligible(self, request: Request) -> None:
        if self.use_v2_model_runner:
            request.next_decode_eligible_step = self.current_step + self.decode_stagger

    def only_decodes(self, queue: Sequence[tuple[object, SchedulerOutput, object]] | None) -> bool:
        """Whether the next step only decodes all rows and can admit no request. `queue`: the batches in flight.

        None: the engine is synchronous; else exactly one must be, and have decoded exactly the rows.
        """
        columns, running = self.columns, self.running
        full = len(running) + self.num_waiting_for_streaming_input >= self.max_num_active_reqs
        if (
            not running
            or columns.earlier is not None
            or ((self.waiting or self.kv_holding_waiting) and not full)
        ):
            return False
        if not self._may_count() or (queue is not None and len(queue) != 1):
            return False
        if self.beside:
            hidden = hidden_of(queue[0][1]) if queue else None
            return running == columns.requests and (
                not queue
                or (
                    hidden is not None
                    and hidden.version == columns.version
                    and len(hidden.names) == len(running) == queue[0][1].total_num_scheduled_tokens
                )
            )
        if queue and queue[0][1].num_scheduled_tokens != {request.request_id: 1 for request in running}:
            return False
        tier = self.steady_tier
        if tier is not None and not (tier.quiet(self.finished_req_ids) and all(map(tier.offered, running))):
            return False
        if any(map(carries_extras, running)):
            return False
        rows = [row for row in map(self._row_of, running) if row is not None]
        if len(rows) < len(running):
            return False
        columns.join(running, rows)
        return True

    def strode(self, steps: int) -> None:
        """Note that a stride has made steps of all rows."""
        self.current_step += steps
        self.count_decoded(self.columns.requests, steps)
        # The first single step would have sent these ids to the workers.
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        self.steady_cohort = self.steady_last_rows = None
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(self.columns.names)


def _with_rows(names: list[str], output: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return a model output in which each of these requests also gets a token."""
    ids = [*names, *output.req_ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: i for i, name in enumerate(ids)},
        sampled_token_ids=[*([0] for _ in names), *output.sampled_token_ids],
    )


@cache
def _with_columns(kind: type) -> type[ColumnDecode]:
    return type(f"Column{kind.__name__}", (ColumnDecode, kind), {"__module__": __name__})


def adopt_columns(scheduler: Scheduler, *, batches: int, digests: bool) -> ColumnDecode | None:
    """Let a scheduler of the steady-decode path count in columns; None for any other.

    `batches`: the most that are in flight.
    """
    kind = type(scheduler)
    if kind not in (SteadyScheduler, SteadyAsyncScheduler):
        return None
    adopted = cast(ColumnDecode, scheduler)
    if (
        scheduler.max_num_scheduled_tokens > adopted.most_step_tokens()
        or adopted.steady_off
        or batches != (2 if adopted.steady_runs_ahead else 1)
    ):
        return None
    scheduler.__class__ = _with_columns(kind)  # type: ignore[arg-type]
    adopted.adopt_columns(digests=digests)
    return adopted
