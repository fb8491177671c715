"""The steady-decode path of `update_from_output`: appends each request's token and builds its output.

Runs in EngineCore. Requests that may stop, or that need more than an appended token (statistics, errors), go through
stock's own `update_from_output`, which is called with these alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableSequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.outputs.message import OUTLET
from kvtune.plugin.core.steps.steady import Cohort, Rows, carries_extras, is_finished
from kvtune.plugin.core.steps.tier import Tier, has_news
from kvtune.plugin.core.tokens.rows import make_rows, one_each, out_rows
from kvtune.plugin.vllm.types import BlockIds, KVCacheManager, Request

if TYPE_CHECKING:
    from kvtune.plugin.core.outputs.outlet import Outlet

Outputs = dict[int, EngineCoreOutputs]


class PlannedUpdate(NamedTuple):
    """What a step's tokens do to its rows. `for_stock`: the step and its output with the special rows alone."""

    cohort: Cohort
    rows: Rows
    sampled: list[int]
    special: list[int]
    """Indices of rows that stock updates."""
    dead: list[int]
    """Indices of rows that have finished since the step was scheduled."""
    for_stock: tuple[SchedulerOutput, ModelRunnerOutput]
    plain: list[bool]
    """Whether each row is neither special nor dead."""
    hashed: list[Request]
    """Requests of plain rows that complete a block of tokens to hash."""


class SteadyUpdate(SchedulerInterface):  # type: ignore[misc]
    """Mixin for a scheduler class: `update_from_output` with the steady-decode path; `SteadyDecode` adds `schedule`.

    It inherits vLLM's interface because Python lets `__class__` be set only to a class of the same memory layout.
    """

    # vLLM's attributes whose types matter here.
    running: list[Request]
    requests: dict[str, Request]
    kv_cache_manager: KVCacheManager
    prev_step_scheduled_req_ids: set[str]
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]
    current_step: int
    max_model_len: int
    hash_block_size: int

    steady_off: str
    """Why the path is not taken; empty while it can be."""
    steady_stock_class: type
    """vLLM's own class, which the scheduler gets back after an error."""
    steady_breaker: Breaker
    steady_steps: int
    """How many steps were scheduled on the path."""
    steady_placed: dict[str, BlockIds]
    """Blocks allocated in a step that stock then had to schedule, by request id. Stock's output must report them."""
    steady_tier: Tier | None
    """The host-memory tier, or None if the engine has none."""
    steady_last_rows: Rows | None
    """The rows of the last step on the path."""
    steady_runs_ahead: bool
    steady_cohort: Cohort | None
    _in_flight: deque[tuple[SchedulerOutput, Cohort, Rows]]
    _order: tuple[list[str], Rows | None, NDArray[np.int64] | None]
    """The worker's order of request ids, the rows, and each row's position in that order (None: the same order)."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Outputs:
        planned = self.steady_breaker.attempt(self._plan_update, scheduler_output, model_runner_output)
        if planned is None:
            self.steady_breaker.attempt(make_rows, model_runner_output)
            result: Outputs = super().update_from_output(scheduler_output, model_runner_output)
            return result
        self._append(planned)
        by_stock: Outputs = super().update_from_output(*planned.for_stock)
        return self.steady_breaker.attempt(self._merged, planned, by_stock) or _unmerged(planned, by_stock)

    def _plan_update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> PlannedUpdate | None:
        """Return what this step's tokens do to its rows, or None if stock must update the step. Changes no request."""
        entry = self._scheduled_as(scheduled)
        if entry is None:
            return None
        cohort, rows = entry
        read = self._read(cohort, rows, output) if cohort is self.steady_cohort else None
        if read is None:
            # Stock updates this step: the rows may no longer be in lockstep.
            self.steady_cohort = None
            return None
        sampled, special, dead = read
        for_stock = _only(rows, special, sampled, output)
        plain = [True] * len(rows)
        for i in (*special, *dead):
            plain[i] = False
        hashed = [rows.requests[i] for i in cohort.completing_blocks(rows).tolist() if plain[i]]
        return PlannedUpdate(cohort, rows, sampled, special, dead, for_stock, plain, hashed)

    def _scheduled_as(self, output: SchedulerOutput) -> tuple[Cohort, Rows] | None:
        """Return the cohort and rows that a step was scheduled with, or None if stock scheduled it."""
        if not any(entry[0] is output for entry in self._in_flight):
            return None
        while True:
            scheduled, cohort, rows = self._in_flight.popleft()
            if scheduled is output:
                return cohort, rows

    def _read(
        self, cohort: Cohort, rows: Rows, output: ModelRunnerOutput
    ) -> tuple[list[int], list[int], list[int]] | None:
        """Return tokens by row, rows that stock must update, and finished rows; or None if stock must update all."""
        if (
            output.logprobs is not None
            or output.prompt_logprobs_dict
            or output.prompt_token_id_logprobs_dict
            or output.pooler_output
            or has_news(output.kv_connector_output)
            or output.ec_connector_output is not None
            or output.num_nans_in_logits
            or output.aux_output_connector_output is not None
            or output.sampling_masks is not None
        ):
            return None
        sampled = one_each(output.sampled_token_ids)
        if sampled is None:
            return None
        order = self._order_of(rows, output)
        if order is not None:
            sampled = sampled[order]
        elif len(sampled) != len(rows):
            return None
        marked = cohort.may_stop(rows, sampled)
        if rows.fresh:
            owing = [i for i, request in enumerate(rows.requests) if carries_extras(request)]
            marked[owing] = True
            rows.fresh = bool(owing)
        dead: list[int] = []
        if rows is not cohort.rows or self.running != cohort.running:
            for i, request in enumerate(rows.requests):
                if request.status != RequestStatus.RUNNING:
                    if not is_finished(request):
                        return None
                    dead.append(i)
                    marked[i] = False
        return sampled.tolist(), np.flatnonzero(marked).tolist(), dead

    def _columns(self, planned: PlannedUpdate) -> EngineCoreOutput | None:
        """Return the plain rows' tokens as columns; None if there is no such row, or the client reads no columns."""
        rows = planned.rows
        outlet: Outlet | None = getattr(self, OUTLET, None)
        if outlet is None or rows.clients is not None or not outlet.reads_columns(rows.client):
            return None
        return outlet.steady(rows, planned.sampled, planned.special, planned.dead, self.requests)

    def _order_of(self, rows: Rows, output: ModelRunnerOutput) -> NDArray[np.int64] | None:
        ids, of_rows, order = self._order
        if of_rows is rows and ids == output.req_ids:
            return order
        order = None
        if output.req_ids != rows.ids:
            index = output.req_id_to_index
            order = np.fromiter(map(index.__getitem__, rows.ids), dtype=np.int64, count=len(rows))
        self._order = (output.req_ids, rows, order)
        return order

    def _append(self, planned: PlannedUpdate) -> None:
        """Append each plain row's token. Stock then updates the special rows."""
        rows, cohort = planned.rows, planned.cohort
        columns: Iterable[tuple[Request, MutableSequence[int], MutableSequence[int], int]]
        columns = zip(rows.requests, rows.outputs, rows.all_tokens, planned.sampled, strict=True)
        if planned.special or planned.dead:
            columns = compress(columns, planned.plain)
        idle = []
        if self.steady_runs_ahead:
            for request, output, all_tokens, token in columns:
                output.append(token)
                all_tokens.append(token)
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= 1
                if not request.num_output_placeholders:
                    idle.append(request)
        else:
            for request, output, all_tokens, token in columns:
                output.append(token)
                all_tokens.append(token)
                request.num_in_flight_tokens -= 1
        for request in planned.hashed:
            request.update_block_hashes()
        cohort.updated += 1
        # Full blocks get their hash when a request is scheduled, and these have not been scheduled since.
        for request in idle:
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)

    def _merged(self, planned: PlannedUpdate, by_stock: Outputs) -> Outputs:
        return _merge(planned, by_stock, self._columns(planned))

    def stand_down(self) -> None:
        """Leave all further steps to stock."""
        self.steady_off = self.steady_breaker.why
        self.steady_cohort = None


def _only(
    rows: Rows, chosen: list[int], sampled: list[int], output: ModelRunnerOutput
) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """Return a scheduler output and a model output that have only the chosen rows."""
    names = [rows.ids[i] for i in chosen]
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens = dict.fromkeys(names, 1)
    scheduled.total_num_scheduled_tokens = len(rows)  # stock counts a step that has tokens
    return scheduled, ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: number for number, name in enumerate(names)},
        sampled_token_ids=[[sampled[i]] for i in chosen],
        cudagraph_stats=output.cudagraph_stats,
    )


def _merge(planned: PlannedUpdate, by_stock: Outputs, columns: EngineCoreOutput | None) -> Outputs:
    """Return the outputs of all rows in scheduling order, as stock makes them. `by_stock`: those of special rows.

    `columns`: one output for all other rows, the last one of its client; None if each row has its own output.
    """
    rows, special, dead = planned.rows, planned.special, planned.dead
    special_outputs = {
        output.request_id: output for outputs in by_stock.values() for output in outputs.outputs
    }
    by_client: dict[int, list[EngineCoreOutput]] = {}
    outputs: list[EngineCoreOutput | None]
    if columns is None:
        outputs = list(map(EngineCoreOutput, rows.ids, out_rows(planned.sampled)))
        for i in special:
            outputs[i] = special_outputs.pop(rows.ids[i], None)
        for i in dead:
            outputs[i] = None
    else:
        outputs = [special_outputs.pop(rows.ids[i], None) for i in special]
    if rows.clients is None:
        gaps = special or dead
        by_client[rows.client] = [output for output in outputs if output is not None] if gaps else outputs
    else:
        for client, output in zip(rows.clients, outputs, strict=True):
            if output is not None:
                by_client.setdefault(client, []).append(output)
    for client, client_outputs in by_stock.items():
        rest = [output for output in client_outputs.outputs if output.request_id in special_outputs]
        if rest:
            by_client.setdefault(client, []).extend(rest)
    if columns is not None:
        by_client[rows.client].append(columns)
    merged = {client: EngineCoreOutputs(outputs=some) for client, some in by_client.items() if some}
    for client, client_outputs in by_stock.items():
        if client_outputs.finished_requests:
            if client not in merged:
                merged[client] = EngineCoreOutputs()
            merged[client].finished_requests = client_outputs.finished_requests
    stats = next(
        (outputs.scheduler_stats for outputs in by_stock.values() if outputs.scheduler_stats is not None),
        None,
    )
    if stats is not None:
        if not merged:
            merged[0] = EngineCoreOutputs()
        next(iter(merged.values())).scheduler_stats = stats
    return merged


def _unmerged(planned: PlannedUpdate, by_stock: Outputs) -> Outputs:
    """Add an output of each plain row to stock's, after an error in `_merge`."""
    for request, token, plain in zip(planned.rows.requests, planned.sampled, planned.plain, strict=True):
        if plain:
            outputs = by_stock.setdefault(request.client_index, EngineCoreOutputs())
            outputs.outputs.append(EngineCoreOutput(request.request_id, [token]))
    return by_stock
