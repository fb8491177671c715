"""Takes many plain decode steps in one call, with the engine's own decisions. Simulator's process only.

Between two events (e.g. a new block), a request only counts tokens, and the core's steady-decode path
(`core/steps/steady.py`) knows each request's next event. A stride handles events in the engine's order, so blocks,
block ids, hits and times are those of single steps. It ends before a step in which a request may arrive, finish or be
preempted.

A turn of a stride schedules and sends one step. A synchronous engine makes its next turn when the step that it has
sent ends; an engine with asynchronous scheduling, when the step before that one ends.

Where all groups of an engine are of full attention or windows in stock's pool, a stride leaps: it makes its steps all
at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from kvtune.core.steps.steady import Cohort, Rows, carries_extras
from kvtune.engine.setup import Simulated
from kvtune.fake_device.cost import StepCost
from kvtune.probe.work import digest
from kvtune.sim.clock import VirtualClock
from kvtune.sim.engine_types import EngineCore
from kvtune.sim.executor import SimExecutor
from kvtune.sim.fast.pool import QuickGroup, QuickWindow, plain_groups
from kvtune.sim.fast.runs import RunPool
from kvtune.sim.fast.steady_path import SteadyPath, available
from kvtune.sim.steps import JOURNALED, BulkStep, DecodedRows, EngineStepper, Stepper, StepResult
from kvtune.vllm.names import prefill_interval
from kvtune.vllm.types import BlockIds, GroupManager, Scheduler

if TYPE_CHECKING:
    from kvtune.sim.clock import VirtualClock
    from kvtune.sim.journal import ReplayJournal
    from kvtune.sim.transport import Client


class InFlight:
    """The batch queue of an engine with asynchronous scheduling, as strides use it."""

    def __init__(self, engine: EngineCore) -> None:
        assert engine.batch_queue is not None
        self._queue = engine.batch_queue

    @property
    def end_s(self) -> float:
        return self._queue[0][0].end_s

    def decodes(self, cohort: Cohort) -> bool:
        """Whether exactly one batch is in flight, and that batch decodes one token of each request of the cohort."""
        return len(self._queue) == 1 and self._queue[0][1].num_scheduled_tokens == cohort.rows.one_each

    def becomes_last(self, end_s: float) -> None:
        """Move the end of the batch in flight to `end_s`, so that it stands for the stride's last batch."""
        self._queue[0][0].end_s = end_s


class Pace:
    """The times of one stride. `due`: the next arrival. `in_flight_end_s`: the end of the batch in flight, if any."""

    def __init__(
        self, clock: VirtualClock, cost: StepCost, due: float | None, in_flight_end_s: float | None
    ) -> None:
        self._cost, self._due = cost, due
        self.turn_s = clock.now_s
        """The time of the next turn. Requests that have arrived by then take part."""
        self.free_s = max(clock.now_s, clock.device_free_s)
        """When the device is free, so that the next step can start."""
        self.first_s = self.free_s
        self._ahead = in_flight_end_s is not None
        self._next_turn_s = self.free_s if in_flight_end_s is None else max(clock.now_s, in_flight_end_s)
        self._first_answer_s = self._next_turn_s

    @property
    def arrival_due(self) -> bool:
        """Whether a request may have arrived by the next turn."""
        return self._due is not None and self._due <= self.turn_s

    def step(self, decodes: int, context: int) -> float:
        """Make a turn that sends a step of `decodes` requests; return the step's end."""
        self.free_s += self._cost.seconds(0, decodes, context)
        if self._ahead:
            self.turn_s, self._next_turn_s = self._next_turn_s, self.free_s
        else:
            self.turn_s = self.free_s
        return self.free_s

    def ends(self, decodes: int, context: int, most: int) -> array[float]:
        """Make up to `most` turns, until one at which a request may have arrived; return the ends of their steps."""
        cost = self._cost  # the sums of `StepCost.seconds`, in its order
        fixed_us = cost.step_us + cost.between_us + cost.decode_us * decodes
        times = (fixed_us + cost.kv_token_us * (context + decodes * np.arange(most))) * 1e-6
        ends = np.add.accumulate(np.concatenate(([self.free_s], times)))[1:]
        turns = np.concatenate(([self.turn_s, self._next_turn_s] if self._ahead else [self.turn_s], ends))
        count = most if self._due is None else min(most, int(np.searchsorted(turns[:most], self._due)))
        if count:
            self.free_s, self.turn_s = float(ends[count - 1]), float(turns[count])
            self._next_turn_s = self.free_s
        return array("d", ends[:count].tobytes())

    def answers(self, ends: array[float]) -> array[float]:
        """Return when each turn gets tokens: at its step's end or, with async scheduling, at the step before's."""
        return array("d", [self._first_answer_s]) + ends[:-1] if self._ahead and ends else ends


SHORTEST_LEAP = 2

Ints = NDArray[np.int64]


class Leaper:
    """Makes many plain decode steps at once: the same blocks are taken and cached, in the same order, as step by step.

    It needs groups of full attention or windows in stock's pool. Those of full attention take blocks and return none.
    """

    def __init__(
        self, scheduler: Scheduler, path: SteadyPath, groups: Sequence[GroupManager], journal: ReplayJournal
    ) -> None:
        self._path, self._groups, self._journal = path, groups, journal
        self._windows = [group for group in groups if isinstance(group, QuickWindow)]
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._size = groups[0].block_size
        lone = groups[0] if len(groups) == 1 and isinstance(groups[0], QuickGroup) else None
        self._cache = scheduler.kv_cache_manager.coordinator.cache_blocks if lone is None else lone.cache_full

    def run(self, cohort: Cohort, most: int, pace: Pace) -> tuple[array[float], array[int]] | None:
        """Take up to `most` steps. Return each step's end and free blocks; None if fewer than 2 steps are possible."""
        rows = cohort.rows
        count = len(rows)
        computed = np.fromiter((request.num_computed_tokens for request in rows.requests), np.int64, count)
        ends = pace.ends(count, int(computed.sum()), most)
        blocks = self._groups[0].req_to_blocks  # all groups have as many places
        held = np.fromiter((len(blocks[name]) for name in rows.ids), np.int64, count)
        steps = self._affordable(computed, held, len(ends))
        if steps < SHORTEST_LEAP:
            return None
        self._advance(cohort, steps)
        starts = [pace.first_s, *ends[:steps]]
        frees = self._deal(cohort, computed, held, steps, starts)
        if frees is None:
            frees = self._replay(cohort, computed.tolist(), held.tolist(), steps, starts)
        self._set_due(cohort)
        return ends[:steps], frees

    def _affordable(self, computed: Ints, held: Ints, steps: int) -> int:
        """Return the number of steps to take: `steps`, halved until the free blocks suffice; 0 for fewer than 2."""
        free = self._pool.get_num_free_blocks()
        while steps >= SHORTEST_LEAP:
            needed = np.maximum(-(-(computed + steps) // self._size) - held, 0).sum()
            if needed * len(self._groups) <= free:
                return steps
            steps //= 2
        return 0

    def _advance(self, cohort: Cohort, steps: int) -> None:
        """Set the requests' counters, tokens and hashes to their values after the steps."""
        rows, tokens = cohort.rows, [0] * steps
        for request, output, everything in zip(rows.requests, rows.outputs, rows.all_tokens, strict=True):
            request.num_computed_tokens += steps
            output.extend(tokens)
            everything.extend(tokens)
            if len(everything) // self._size > len(request.block_hashes):
                request.update_block_hashes()
        cohort.scheduled += steps
        cohort.updated += steps

    def _deal(
        self, cohort: Cohort, computed: Ints, held: Ints, steps: int, starts: Sequence[float]
    ) -> array[int] | None:
        """Do what `_replay` does all at once; None where the order of blocks taken, returned and cached matters.

        It does not if no block is returned, and no block of the pool or of these requests has the hash of another.
        """
        pool, rows, size, width = self._pool, cohort.rows, self._size, len(self._groups)
        full = (computed + (steps - cohort.ahead)) // size if self._manager.enable_caching else computed * 0
        if (
            self._windows
            or not isinstance(pool, RunPool)
            or not pool.are_new(self._groups, rows.requests, full)
        ):
            return None
        first = held * size - computed
        counts = np.maximum(-((first - steps) // size), 0)
        row = np.arange(len(rows)).repeat(counts)
        step = (first - size * (counts.cumsum() - counts)).repeat(counts) + size * np.arange(len(row))
        order = np.lexsort((row, step))
        row, step = row[order], step[order]
        free = pool.get_num_free_blocks() - width * np.bincount(step, minlength=steps).cumsum()
        evicts = np.array(pool.are_hashed(width * len(row)), bool)
        blocks = pool.get_new_blocks(width * len(row))
        self._journal.add_evictions(starts, np.bincount(step.repeat(width)[evicts], minlength=steps), free)
        for number, group in enumerate(self._groups):
            lists = [group.req_to_blocks[name] for name in rows.ids]
            for index, block in zip(row.tolist(), blocks[number::width], strict=True):
                lists[index].append(block)
            for request, end in zip(rows.requests, full.tolist(), strict=True):
                cast(QuickGroup, group).cache_full(request, end * size)
        return array("i", free.astype("i4").tobytes())

    def _replay(
        self, cohort: Cohort, computed: list[int], held: list[int], steps: int, starts: list[float]
    ) -> array[int]:
        """Take and cache blocks step after step, in the requests' order. Return how many are free in each step.

        In step j a request gives back what has left its windows, takes a block in each group if its blocks are full,
        and caches one that its known tokens have filled.
        """
        size, rows, pool = self._size, cohort.rows, self._pool
        events: list[
            tuple[int, int, int]
        ] = []  # step, row, tokens to cache (0: take blocks; less: tokens that left)
        for i, (begun, places) in enumerate(zip(computed, held, strict=True)):
            events += [(step, i, 0) for step in range(places * size - begun, steps, size)]
            first = min(group.num_cached_block.get(rows.ids[i], 0) for group in self._groups) + 1
            lag = cohort.ahead - 1 - begun
            last_cached = begun + steps - cohort.ahead if self._manager.enable_caching else 0
            events += [(max(0, upto + lag), i, upto) for upto in range(first * size, last_cached + 1, size)]
            for window in self._windows:
                events += window.leaves(rows.ids[i], i, begun - cohort.ahead, steps)
        events.sort()
        free = np.empty(steps, np.int32)
        last = 0
        for step, i, upto in events:
            if step != last:
                free[last:step] = pool.get_num_free_blocks()
                self._journal.add_pool_changes(starts[last], int(free[last]))
                last = step
            name = rows.ids[i]
            if upto > 0:
                self._cache(rows.requests[i], upto)
            elif upto == 0:
                for group in self._groups:
                    group.req_to_blocks[name] += pool.get_new_blocks(1)
            else:
                for window in self._windows:
                    window.remove_skipped_blocks(name, -upto)
        free[last:] = pool.get_num_free_blocks()
        self._journal.add_pool_changes(starts[last], int(free[last]))
        return array("i", free.tobytes())

    def _set_due(self, cohort: Cohort) -> None:
        """Set the next event of each request whose event has passed."""
        for i in (cohort.due <= cohort.scheduled).nonzero()[0].tolist():
            request = cohort.rows.requests[i]
            event = self._path.next_event(request, cohort.ahead)
            cohort.due[i] = cohort.scheduled + max(1, event - request.num_computed_tokens + 1)


LONGEST_STRIDE = 4096
"""The most steps of one stride."""


class StrideStepper:
    """Takes as many plain decode steps as it can and writes them to the journal.

    `leaps`: compute all steps of a stride at once if the engine allows it.
    `in_flight`: the batch that an engine with asynchronous scheduling has in flight; None for a synchronous one.
    """

    def __init__(
        self,
        engine: EngineCore,
        path: SteadyPath,
        client: Client,
        clock: VirtualClock,
        journal: ReplayJournal,
        in_flight: InFlight | None = None,
        *,
        leaps: bool,
    ) -> None:
        self._scheduler, self._path, self._in_flight = engine.scheduler, path, in_flight
        self._client, self._clock, self._journal = client, clock, journal
        self._cost = engine.model_executor.machine.cost
        self._indexes: tuple[Rows | None, list[int]] = (None, [])
        groups = plain_groups(self._scheduler) if leaps else ()
        self._leaper = Leaper(self._scheduler, path, groups, journal) if groups else None

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
        most = min(int(rows.stop_at.min()) - cohort.scheduled + cohort.ahead - 1, LONGEST_STRIDE)
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
        self._path.decoded(rows, taken)
        return JOURNALED

    def _pipeline_holds(self, cohort: Cohort) -> bool:
        """Whether the engine is synchronous, or has exactly one batch in flight, of the cohort's requests."""
        if self._in_flight is None:
            return True
        return cohort.ahead == 1 and self._in_flight.decodes(cohort)

    def _pace(self) -> Pace:
        end_s = None if self._in_flight is None else self._in_flight.end_s
        return Pace(self._clock, self._cost, self._client.next_time(), end_s)

    def _leap(self, cohort: Cohort, most: int, context: int) -> int:
        if self._leaper is None:
            return 0
        pace = self._pace()
        leaped = self._leaper.run(cohort, most, pace)
        if leaped is None:
            return 0
        ends, frees = leaped
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
        indexed_rows, indexes = self._indexes
        if indexed_rows is not rows:
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


def steppers(
    engine: EngineCore,
    settings: Simulated,
    client: Client,
    clock: VirtualClock,
    journal: ReplayJournal,
    *,
    single_steps: bool,
) -> tuple[Stepper, ...]:
    """Return the steppers. `single_steps`: an observer must see every single step, so strides are left out."""
    # To space prefills, vLLM counts single steps; a step with draft tokens is no plain decode.
    counted = prefill_interval(engine.scheduler) > 1 or bool(engine.scheduler.num_spec_tokens)
    queue = engine.batch_queue
    strides = (
        settings.shortcuts
        and not counted
        and not single_steps
        and isinstance(engine.model_executor, SimExecutor)
        and available(engine.scheduler, batches=1 if queue is None else engine.batch_queue_size)
    )
    last = EngineStepper(engine)
    if not strides:
        return (last,)
    path = SteadyPath(engine.scheduler)
    in_flight = None if queue is None else InFlight(engine)
    leaps = not settings.digests  # which are of single steps
    return (StrideStepper(engine, path, client, clock, journal, in_flight, leaps=leaps), last)
