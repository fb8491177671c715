"""Takes many plain decode steps in one call, with the engine's own decisions. Simulator's process only.

Between two events (e.g. a new block), a request only counts tokens, and the core's steady-decode path
(`core/steps/steady.py`) knows each request's next event. A stride handles events in the engine's order, so blocks,
block ids, hits and times are those of single steps. It ends before a step in which a request may arrive, finish or be
preempted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvtune.core.steps.steady import Cohort, Rows, carries_extras
from kvtune.probe.digest import digest
from kvtune.sim.engine_types import EngineCore
from kvtune.sim.fast.leap import Leaper
from kvtune.sim.fast.pace import Pace
from kvtune.sim.fast.pool import lone_group
from kvtune.sim.fast.steady_path import SteadyPath
from kvtune.sim.steps import JOURNALED, BulkStep, DecodedRows, StepResult
from kvtune.vllm.types import BlockIds

if TYPE_CHECKING:
    from kvtune.sim.clock import VirtualClock
    from kvtune.sim.fast.in_flight import InFlight
    from kvtune.sim.journal import ReplayJournal
    from kvtune.sim.transport import Transport

LONGEST = 4096
"""The most steps of one stride."""


class StrideStepper:
    """Takes as many plain decode steps as it can and writes them to the journal.

    `leaps`: compute all steps of a stride at once if the engine allows it (`leap.py`); block ids then differ.
    `in_flight`: the batch that an engine with asynchronous scheduling has in flight; None for a synchronous one.
    """

    def __init__(
        self,
        engine: EngineCore,
        path: SteadyPath,
        transport: Transport,
        clock: VirtualClock,
        journal: ReplayJournal,
        in_flight: InFlight | None = None,
        *,
        leaps: bool,
    ) -> None:
        self._scheduler, self._path, self._in_flight = engine.scheduler, path, in_flight
        self._transport, self._clock, self._journal = transport, clock, journal
        self._cost = engine.model_executor.machine.cost
        self._indexes: tuple[Rows | None, list[int]] = (None, [])
        group = lone_group(self._scheduler) if leaps else None
        self._leaper = None if group is None else Leaper(self._scheduler, path, group)

    def try_step(self) -> StepResult | None:
        if self._path.off:
            return None
        cohort = self._path.lockstep()  # of all running requests
        if cohort is None or cohort.stop_table is not None or not self._pipeline_holds(cohort):
            return None
        rows = cohort.rows
        if rows.fresh:
            rows.fresh = any(map(carries_extras, rows.requests))
        if rows.fresh or (rows.eos >= 0).any():
            return None
        most = min(int(rows.stop_at.min()) - cohort.scheduled + cohort.ahead - 1, LONGEST)
        if most < 1:
            return None
        ahead = self._in_flight
        context = sum(request.num_computed_tokens for request in rows.requests)
        taken = self._leap(cohort, most, context) or self._stride(cohort, most, context)
        if not taken:
            return None
        if ahead is not None:
            ahead.becomes_last(self._clock.device_free_s)
        scheduler = self._scheduler
        scheduler.current_step += taken
        # The first single step would have sent these ids to the workers.
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
        self._path.decoded(rows)
        return JOURNALED

    def _pipeline_holds(self, cohort: Cohort) -> bool:
        """Whether the engine is synchronous, or has exactly one batch in flight, of the cohort's requests."""
        if self._in_flight is None:
            return True
        return cohort.ahead == 1 and self._in_flight.decodes(cohort)

    def _pace(self) -> Pace:
        end_s = None if self._in_flight is None else self._in_flight.end_s
        return Pace(self._clock, self._cost, self._transport.next_time(), end_s)

    def _leap(self, cohort: Cohort, most: int, context: int) -> int:
        if self._leaper is None:
            return 0
        pace = self._pace()
        leaped = self._leaper.run(cohort, most, pace)
        if leaped is None:
            return 0
        ends, frees = leaped
        self._journal.add_pool_changes(pace.first_s, frees[0])
        self._write(cohort.rows, pace, ends, frees, context)
        return len(ends)

    def _stride(self, cohort: Cohort, most: int, context: int) -> int:
        """Take up to `most` steps and return their number. All state is then as after that many single steps."""
        scheduler, clock, rows = self._scheduler, self._clock, cohort.rows
        count, before = len(rows), context
        begun = [request.num_computed_tokens for request in rows.requests]
        done = [0] * count
        pace = self._pace()
        pool = scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        ends, frees = array("d"), array("i")
        next_event = int(cohort.due.min())
        for step in range(most):
            if pace.arrival_due:
                break
            blocks = None
            if next_event <= cohort.scheduled + 1:
                clock.now_s = pace.turn_s
                for i in (cohort.due <= cohort.scheduled + 1).nonzero()[0].tolist():
                    _catch_up(rows, i, step - done[i])
                    done[i] = step
                blocks = self._path.allocate_due(cohort)
                if blocks is None:
                    break
                free = pool.get_num_free_blocks()
                self._journal.add_pool_changes(pace.free_s, free)
                next_event = int(cohort.due.min())
            if self._journal.keeps_digests:
                self._digest(rows, begun, step, blocks)
            cohort.scheduled += 1
            ends.append(pace.step(count, context))
            context += count
            frees.append(free)
        taken = len(ends)
        for i in range(count):
            _catch_up(rows, i, taken - done[i])
        cohort.updated += taken
        if taken:
            self._write(rows, pace, ends, frees, before)
        return taken

    def _digest(
        self, rows: Rows, begun: list[int], step: int, blocks: Sequence[BlockIds | None] | None
    ) -> None:
        cached = DecodedRows(blocks or (), [computed + step for computed in begun])
        self._journal.digests.append(digest(BulkStep(rows.one_each, (), cached)))

    def _write(self, rows: Rows, pace: Pace, ends: array[float], frees: array[int], context: int) -> None:
        journal, scheduler, taken, count = self._journal, self._scheduler, len(ends), len(rows)
        answers = pace.answers(ends)
        self._clock.now_s, self._clock.device_free_s = answers[-1], ends[-1]
        known, indexes = self._indexes
        if known is not rows:
            indexes = [int(name) for name in rows.ids]
            self._indexes = (rows, indexes)
        journal.output[indexes] += taken
        if journal.keeps_tokens:
            journal.token_request.extend(indexes * taken)
            journal.token_s.frombytes(np.repeat(np.frombuffer(answers), count).tobytes())
        steps = journal.steps
        steps.start_s.append(pace.first_s)
        steps.start_s.extend(ends[:-1])
        steps.end_s.extend(ends)
        counts = array("i", [count]) * taken
        steps.tokens.extend(counts)
        steps.requests.extend(counts)
        steps.prefill_tokens.extend(array("i", [0]) * taken)
        steps.running.extend(array("i", [len(scheduler.running)]) * taken)
        steps.waiting.extend(array("i", [len(scheduler.waiting)]) * taken)
        steps.free_blocks.extend(frees)
        steps.context_tokens.extend(array("q", range(context, context + taken * count, count)))
        steps.prefill_context_tokens.extend(array("q", [0]) * taken)
        journal.jumps += 1
        journal.jumped_steps += taken


def _catch_up(rows: Rows, i: int, steps: int) -> None:
    """Add the tokens of `steps` steps to request number `i`."""
    if steps:
        request, tokens = rows.requests[i], [0] * steps
        request.num_computed_tokens += steps
        rows.outputs[i].extend(tokens)
        rows.all_tokens[i].extend(tokens)
        request.update_block_hashes()
