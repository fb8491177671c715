"""Many plain decode steps in one call, each decided as the engine would decide it. Simulator's process only.

Between two events a running request only counts tokens, and the core's steady-decode path (`core/steps/steady.py`)
knows each request's next event. A stride goes from event to event in the engine's order, so blocks, their ids, hits and
times are those of single steps; it ends where somebody may come, finish or be preempted, which is the engine's own
business.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtune.core.steps.steady import carries_extras
from kvtune.probe.digest import digest
from kvtune.sim.fast.leap import Leaper
from kvtune.sim.fast.pool import lone_group

if TYPE_CHECKING:
    from kvtune.probe.pool import PoolWatch
    from kvtune.sim.clock import VirtualClock
    from kvtune.sim.front_end import FrontEnd
    from kvtune.sim.journal import ReplayJournal

LONGEST = 4096
NEVER = 1 << 60


class Strider:
    """`run` takes as many plain decode steps as it can and writes them down; False when it took none."""

    def __init__(
        self,
        engine: Any,
        front: FrontEnd,
        clock: VirtualClock,
        journal: ReplayJournal,
        watch: PoolWatch,
        *,
        tokens: bool,
        digests: bool,
        leaps: bool,
    ) -> None:
        self._scheduler, self._front, self._clock, self._journal = engine.scheduler, front, clock, journal
        self._cost = engine.model_executor.machine.cost
        self._watch, self._tokens, self._digests = watch, tokens, digests
        self._known: tuple[Any, list[int]] = (None, [])
        group = lone_group(self._scheduler) if leaps else None
        self._leaper = None if group is None else Leaper(self._scheduler, group, self._cost)

    @staticmethod
    def can(engine: Any) -> bool:
        """Whether this engine computes nothing, its scheduler has the steady path and works step by step."""
        from kvtune.sim.executor import SimExecutor

        if not isinstance(engine.model_executor, SimExecutor):
            return False
        off = getattr(engine.scheduler, "steady_off", "another scheduler")
        return not off and engine.batch_queue is None and not engine.scheduler.steady_runs_ahead

    def run(self) -> bool:
        scheduler = self._scheduler
        if scheduler.steady_off:
            return False
        cohort = scheduler.find_steady_cohort()
        if cohort is None or cohort.stop_table is not None:
            return False
        rows = cohort.rows
        if rows.fresh:
            rows.fresh = any(map(carries_extras, rows.requests))
        if rows.fresh or (rows.eos >= 0).any():
            return False
        left = int(rows.stop_at.min()) - cohort.updated - 1
        if left < 1:
            return False
        taken = self._leap(cohort, min(left, LONGEST)) or self._go(cohort, min(left, LONGEST))
        if not taken:
            return False
        scheduler.current_step += taken
        # The first of these steps would have told the workers.
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
        if rows is not scheduler.steady_last_rows:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(rows.ids)
            scheduler.steady_last_rows = rows
        return True

    def _leap(self, cohort: Any, most: int) -> int:
        if self._leaper is None:
            return 0
        clock, rows = self._clock, cohort.rows
        context = sum(request.num_computed_tokens for request in rows.requests)
        first = max(clock.now_s, clock.device_free_s)
        found = self._leaper.run(cohort, most, first, self._front.next_time())
        if found is None:
            return 0
        ends, frees = found
        self._journal.pool_news(self._watch, first, frees[0])
        clock.now_s = clock.device_free_s = ends[-1]
        self._write(rows, first, ends, frees, context)
        return len(ends)

    def _go(self, cohort: Any, most: int) -> int:
        """Steps taken, at most `most`; requests, blocks, the clock and the journal are as after them."""
        scheduler, clock, rows = self._scheduler, self._clock, cohort.rows
        count = len(rows)
        begun = [request.num_computed_tokens for request in rows.requests]
        done = [0] * count
        context = sum(begun)
        seconds, due = self._cost.seconds, self._front.next_time()
        pool = scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        first = at = max(clock.now_s, clock.device_free_s)
        ends, frees = array("d"), array("i")
        next_event = int(cohort.due.min())
        for step in range(most):
            if due is not None and due <= at:
                break
            blocks = None
            if next_event <= cohort.scheduled + 1:
                clock.now_s = at
                for i in (cohort.due <= cohort.scheduled + 1).nonzero()[0].tolist():
                    _catch_up(rows, i, step - done[i])
                    done[i] = step
                blocks = scheduler.allocate_steady_blocks(cohort)
                if blocks is None:
                    break
                free = pool.get_num_free_blocks()
                self._journal.pool_news(self._watch, at, free)
                next_event = int(cohort.due.min())
            if self._digests:
                self._digest(rows, begun, step, blocks)
            cohort.scheduled += 1
            at += seconds(0, count, context)
            context += count
            ends.append(at)
            frees.append(free)
        taken = len(ends)
        for i in range(count):
            _catch_up(rows, i, taken - done[i])
        cohort.updated += taken
        if taken:
            clock.now_s = clock.device_free_s = at
            self._write(rows, first, ends, frees, sum(begun))
        return taken

    def _digest(self, rows: Any, begun: list[int], step: int, blocks: list[Any] | None) -> None:
        cached = SimpleNamespace(
            new_block_ids=blocks or (), num_computed_tokens=[computed + step for computed in begun]
        )
        scheduled = SimpleNamespace(
            num_scheduled_tokens=rows.one_each, scheduled_new_reqs=(), scheduled_cached_reqs=cached
        )
        self._journal.digests.append(digest(scheduled))

    def _write(self, rows: Any, first: float, ends: array[float], frees: array[int], context: int) -> None:
        journal, scheduler, taken, count = self._journal, self._scheduler, len(ends), len(rows)
        known, indexes = self._known
        if known is not rows:
            indexes = [int(name) for name in rows.ids]
            self._known = (rows, indexes)
        journal.output[indexes] += taken
        if self._tokens:
            journal.token_request.extend(indexes * taken)
            journal.token_s.frombytes(np.repeat(np.frombuffer(ends), count).tobytes())
        start, end, tokens, prefill, requests, running, waiting, free, contexts, prefill_contexts = (
            journal.steps
        )
        start.append(first)
        start.extend(ends[:-1])
        end.extend(ends)
        counts = array("i", [count]) * taken
        tokens.extend(counts)
        requests.extend(counts)
        prefill.extend(array("i", [0]) * taken)
        running.extend(array("i", [len(scheduler.running)]) * taken)
        waiting.extend(array("i", [len(scheduler.waiting)]) * taken)
        free.extend(frees)
        contexts.extend(array("q", range(context, context + taken * count, count)))
        prefill_contexts.extend(array("q", [0]) * taken)
        journal.jumps += 1
        journal.jumped_steps += taken


def _catch_up(rows: Any, i: int, steps: int) -> None:
    """Give one request the tokens of the steps since it was last looked at."""
    if steps:
        request, tokens = rows.requests[i], [0] * steps
        request.num_computed_tokens += steps
        rows.outputs[i].extend(tokens)
        rows.all_tokens[i].extend(tokens)
        request.update_block_hashes()
