"""Takes many plain decode steps in one call, with the engine's own decisions. Simulator's process only.

Between two events (e.g. a new block), a request only counts tokens, and its row (`columns.py`) knows its next event. A
stride handles events in the engine's order, so blocks, block ids, hits and times are those of single steps. It ends
before a step in which a request may arrive, finish or be preempted.

A turn of a stride schedules and sends one step. A synchronous engine makes its next turn when the step that it has
sent ends; an engine with asynchronous scheduling, when the step before that one ends.

Where all groups of an engine are of full attention or windows in stock's pool, a stride leaps: it makes its steps all
at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvtune.lab.device.cost import StepCost
from kvtune.lab.setup.setup import Simulated
from kvtune.lab.sim.clock import VirtualClock
from kvtune.lab.sim.engine_types import EngineCore
from kvtune.lab.sim.executor import SimExecutor
from kvtune.lab.sim.fast.columns import CACHED, DUE, INDEX, LAST, SLOTS, TOKENS, Columns, Ints
from kvtune.lab.sim.fast.pool import QuickGroup, QuickWindow, plain_groups
from kvtune.lab.sim.fast.scheduler import ColumnDecode, adopt_columns
from kvtune.lab.sim.steps import JOURNALED, BulkStep, DecodedRows, EngineStepper, Stepper, StepResult
from kvtune.plugin.probe.work import digest
from kvtune.plugin.vllm.names import prefill_interval
from kvtune.plugin.vllm.types import BlockIds, GroupManager

if TYPE_CHECKING:
    from kvtune.lab.sim.clock import VirtualClock
    from kvtune.lab.sim.journal import ReplayJournal
    from kvtune.lab.sim.transport import Client


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
        """Return the ends of the steps of up to `most` turns, until one at which a request may have arrived."""
        cost = self._cost  # the sums of `StepCost.seconds`, in its order
        fixed_us = cost.step_us + cost.between_us + cost.decode_us * decodes
        times = (fixed_us + cost.kv_token_us * (context + decodes * np.arange(most))) * 1e-6
        ends = np.add.accumulate(np.concatenate(([self.free_s], times)))[1:]
        turns = np.concatenate(([self.turn_s, self._next_turn_s] if self._ahead else [self.turn_s], ends))
        count = most if self._due is None else min(most, int(np.searchsorted(turns[:most], self._due)))
        return array("d", ends[:count].tobytes())

    def answers(self, ends: array[float]) -> array[float]:
        """Return when each turn gets tokens: at its step's end or, with async scheduling, at the step before's."""
        return array("d", [self._first_answer_s]) + ends[:-1] if self._ahead and ends else ends


LONGEST_STRIDE = 4096
"""The most steps of one stride."""


class StrideStepper:
    """Takes as many plain decode steps as it can, and writes them to the journal.

    `groups`: those of an engine that leaps; none if a stride goes step by step.
    """

    def __init__(
        self,
        engine: EngineCore,
        scheduler: ColumnDecode,
        groups: Sequence[GroupManager],
        client: Client,
        clock: VirtualClock,
        journal: ReplayJournal,
    ) -> None:
        self._scheduler, self._groups, self._queue = scheduler, groups, engine.batch_queue
        self._client, self._clock, self._journal = client, clock, journal
        self._cost = engine.model_executor.machine.cost
        self._windows = [group for group in groups if isinstance(group, QuickWindow)]
        self._pool = engine.scheduler.kv_cache_manager.block_pool
        self._size = engine.scheduler.hash_block_size
        lone = groups[0] if len(groups) == 1 and isinstance(groups[0], QuickGroup) else None
        self._cache = scheduler.kv_cache_manager.coordinator.cache_blocks if lone is None else lone.cache_full

    def try_step(self) -> StepResult | None:
        scheduler, queue = self._scheduler, self._queue
        if not scheduler.only_decodes(queue):
            return None
        columns = scheduler.columns
        most = min(int((columns.table[LAST] - columns.table[TOKENS]).min()) - 1, LONGEST_STRIDE)
        pace = Pace(self._clock, self._cost, self._client.next_time(), queue[0][0].end_s if queue else None)
        taken = 0
        if most >= 1:
            taken = self._leap(columns, most, pace) or self._stride(columns, most, pace)
        if taken:
            if queue:  # the batch in flight stands for the stride's last
                queue[0][0].end_s = self._clock.device_free_s
            scheduler.strode(taken)
        if not scheduler.beside:
            scheduler.leave_columns()
        return JOURNALED if taken else None

    def _stride(self, columns: Columns, most: int, pace: Pace) -> int:
        """Take up to `most` steps, one after another, and return their number."""
        scheduler, table, count = self._scheduler, columns.table, len(columns.names)
        computed = columns.computed()
        begun = context = int(computed.sum())
        free = self._pool.get_num_free_blocks()
        ends, frees = array("d"), array("i")
        due = int((table[DUE] - table[TOKENS]).min())
        counted = 0
        for step in range(most):
            if pace.arrival_due:
                break
            new_blocks: Mapping[str, BlockIds | None] = {}
            if step >= due:
                table[TOKENS] += step - counted
                counted = step
                self._clock.now_s = pace.turn_s
                going_on = scheduler.can_place()
                if going_on is None:
                    break
                new_blocks = scheduler.place(going_on)
                scheduler.kv_cache_manager.take_boundary_state_offloads()
                free = self._pool.get_num_free_blocks()
                self._journal.add_pool_changes(pace.free_s, free)
                due = step + max(1, int((table[DUE] - table[TOKENS]).min()))
            if self._journal.keeps_digests:
                rows = DecodedRows([*map(new_blocks.get, columns.names)], (computed + step).tolist())
                self._journal.digests.append(digest(BulkStep(dict.fromkeys(columns.names, 1), (), rows)))
            ends.append(pace.step(count, context))
            context += count
            frees.append(free)
        taken = len(ends)
        table[TOKENS] += taken - counted
        if taken:
            self._write(columns, pace, ends, frees, begun)
        return taken

    def _leap(self, columns: Columns, most: int, pace: Pace) -> int:
        """Take up to `most` steps at once and return their number; 0 if that is not possible."""
        if not self._groups:
            return 0
        table, computed = columns.table, columns.computed()
        context = int(computed.sum())
        ends = pace.ends(len(computed), context, most)
        steps = self._affordable(columns, len(ends))
        if not steps:
            return 0
        del ends[steps:]
        starts = [pace.first_s, *ends]
        dealt = self._scheduler.dealer.deal(columns, steps)
        table[TOKENS] += steps
        if dealt is None:
            frees = self._replay(columns, computed, steps, starts)
        else:
            frees = array("i", dealt.free.astype("i4").tobytes())
            self._journal.add_evictions(starts, dealt.evicted, dealt.free)
        self._write(columns, pace, ends, frees, context)
        return steps

    def _affordable(self, columns: Columns, steps: int) -> int:
        """Return the number of steps to take: `steps`, halved until the free blocks suffice."""
        free, lacking = self._pool.get_num_free_blocks(), columns.computed() - columns.table[SLOTS]
        while steps and np.maximum(-(-(lacking + steps) // self._size), 0).sum() * len(self._groups) > free:
            steps //= 2
        return steps

    def _replay(self, columns: Columns, computed: Ints, steps: int, starts: Sequence[float]) -> array[int]:
        """Take and cache blocks step after step, in the requests' order. Return how many are free in each step.

        In step j a request gives back what has left its windows, takes a block in each group if its blocks are full,
        and caches one that its known tokens have filled.
        """
        table, size, names, pool = columns.table, self._size, columns.names, self._pool
        due = (table[TOKENS] > table[DUE]).nonzero()[0].tolist()
        events: list[
            tuple[int, int, int]
        ] = []  # step, row, tokens to cache (0: take blocks; less: tokens that left)
        for i in due:
            self._scheduler.settle(i, 0)
            begun = int(computed[i])
            tokens = begun + 1 - columns.ahead
            events += [(step, i, 0) for step in range(int(table[SLOTS, i]) - begun, steps, size)]
            events += [
                (max(0, upto - tokens), i, upto)
                for upto in range(int(table[CACHED, i]), tokens + steps, size)
            ]
            for window in self._windows:
                events += window.leaves(names[i], i, begun - columns.ahead, steps)
        events.sort()
        free = np.empty(steps, np.int32)
        last = 0
        for step, i, upto in events:
            if step != last:
                free[last:step] = pool.get_num_free_blocks()
                self._journal.add_pool_changes(starts[last], int(free[last]))
                last = step
            if upto > 0:
                self._cache(columns.requests[i], upto)
            elif upto == 0:
                for group in self._groups:
                    group.req_to_blocks[names[i]] += pool.get_new_blocks(1)
            else:
                for window in self._windows:
                    window.remove_skipped_blocks(names[i], -upto)
        free[last:] = pool.get_num_free_blocks()
        self._journal.add_pool_changes(starts[last], int(free[last]))
        for i in due:
            table[SLOTS : DUE + 1, i] = self._scheduler.events(columns.requests[i])
        return array("i", free.tobytes())

    def _write(
        self, columns: Columns, pace: Pace, ends: array[float], frees: array[int], context: int
    ) -> None:
        """Write the steps of a stride, each of which decoded all rows, and set the clock."""
        journal, scheduler, clock = self._journal, self._scheduler, self._clock
        indexes = columns.table[INDEX]
        taken, count = len(ends), len(indexes)
        answers = pace.answers(ends)
        clock.now_s, clock.device_free_s = answers[-1], ends[-1]
        journal.output[indexes] += taken
        if journal.keeps_tokens:
            journal.token_request.frombytes(np.tile(indexes.astype("i4"), taken).tobytes())
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


class ColumnStepper(EngineStepper):
    """Makes one step with vLLM's own EngineCore, whose scheduler counts in columns."""

    def __init__(self, engine: EngineCore, scheduler: ColumnDecode) -> None:
        super().__init__(engine)
        self._scheduler = scheduler

    def try_step(self) -> StepResult:
        result = super().try_step()
        decoded, self._scheduler.decoded = self._scheduler.decoded, None
        return StepResult(result.outputs, result.executed, decoded)


def steppers(
    engine: EngineCore,
    settings: Simulated,
    client: Client,
    clock: VirtualClock,
    journal: ReplayJournal,
    *,
    observed: bool,
    single_steps: bool,
) -> tuple[Stepper, ...]:
    """Return the steppers.

    `observed`: an observer listens to the pool, which a leap changes at other times and for no request: there is none.
    `single_steps`: an observer must see every single step, so strides are left out, too.
    """
    # To space prefills, vLLM counts single steps; a step with draft tokens is no plain decode.
    counted = prefill_interval(engine.scheduler) > 1 or bool(engine.scheduler.num_spec_tokens)
    groups = plain_groups(engine.scheduler)
    scheduler = None
    if (
        settings.shortcuts
        and not counted
        and not single_steps
        and isinstance(engine.model_executor, SimExecutor)
    ):
        batches = 1 if engine.batch_queue is None else engine.batch_queue_size
        scheduler = adopt_columns(engine.scheduler, groups, batches=batches, digests=settings.digests)
    if scheduler is None:
        return (EngineStepper(engine),)
    journal.preempted.settle = scheduler.leave_columns
    groups = () if settings.digests or observed else groups  # digests are of single steps
    strider = StrideStepper(engine, scheduler, groups, client, clock, journal)
    return (strider, ColumnStepper(engine, scheduler))
