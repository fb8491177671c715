"""Takes many plain decode steps in one call, with the engine's own decisions. Simulator's process only.

Between two events (e.g. a new block), a request only counts tokens, and its row (`columns.py`) knows its next event. A
stride handles events in the engine's order, so blocks, block ids, hits and times are those of single steps. It ends
before a step in which a request may arrive, finish or be preempted.

A turn of a stride schedules and sends one step. A synchronous engine makes its next turn when the step that it has
sent ends; an engine with asynchronous scheduling, when the step before that one ends.

Where the order of a stride's blocks does not matter, it leaps: they are dealt all at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtune.lab.device.cost import StepCost
from kvtune.lab.setup.setup import Simulated
from kvtune.lab.sim.clock import VirtualClock
from kvtune.lab.sim.engine_types import EngineCore
from kvtune.lab.sim.executor import SimExecutor
from kvtune.lab.sim.fast.columns import DUE, INDEX, LAST, TOKENS, Ints
from kvtune.lab.sim.fast.scheduler import ColumnDecode, adopt_columns
from kvtune.lab.sim.steps import JOURNALED, BulkStep, DecodedRows, EngineStepper, Stepper, StepResult
from kvtune.plugin.probe.work import digest
from kvtune.plugin.vllm.names import prefill_interval
from kvtune.plugin.vllm.types import BlockIds

if TYPE_CHECKING:
    from kvtune.lab.sim.journal import ReplayJournal
    from kvtune.lab.sim.transport import Client

Seconds = NDArray[np.float64]

LONGEST_STRIDE = 4096
"""The most steps of one stride."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The times of a stride's turns: when each begins, when its step starts and ends, and when it gets tokens."""

    turns: Seconds
    starts: Seconds
    ends: Seconds
    answers: Seconds


def pace(
    clock: VirtualClock, cost: StepCost, decodes: int, context: int, most: int, in_flight_end_s: float | None
) -> Pace:
    """Return the times of `most` turns that decode `decodes` requests. `in_flight_end_s`: of the batch in flight."""
    # The sums of `StepCost.seconds`, in its order.
    fixed_us = cost.step_us + cost.between_us + cost.decode_us * decodes
    steps_s = (fixed_us + cost.kv_token_us * (context + decodes * np.arange(most))) * 1e-6
    line = np.add.accumulate(np.concatenate(([max(clock.now_s, clock.device_free_s)], steps_s)))
    ahead = [] if in_flight_end_s is None else [max(clock.now_s, in_flight_end_s)]
    turns = np.concatenate(([clock.now_s], ahead, line[1:]))
    return Pace(turns[:most], line[:-1], line[1:], turns[1 : most + 1])


class StrideStepper:
    """Takes as many plain decode steps as it can, and writes them to the journal.

    `leaps`: whether blocks may be dealt for many steps at once.
    """

    def __init__(
        self,
        engine: EngineCore,
        scheduler: ColumnDecode,
        client: Client,
        clock: VirtualClock,
        journal: ReplayJournal,
        *,
        leaps: bool,
    ) -> None:
        self._scheduler, self._queue, self._leaps = scheduler, engine.batch_queue, leaps
        self._client, self._clock, self._journal = client, clock, journal
        self._cost = engine.model_executor.machine.cost
        self._pool = engine.scheduler.kv_cache_manager.block_pool

    def try_step(self) -> StepResult | None:
        scheduler, queue = self._scheduler, self._queue
        if not scheduler.only_decodes(queue):
            return None
        table = scheduler.columns.table
        most = min(int((table[LAST] - table[TOKENS]).min()) - 1, LONGEST_STRIDE)
        taken = self._stride(most, queue[0][0].end_s if queue else None) if most >= 1 else 0
        if taken:
            if queue:  # the batch in flight stands for the stride's last
                queue[0][0].end_s = self._clock.device_free_s
            scheduler.strode(taken)
        if not scheduler.beside:
            scheduler.leave_columns()
        return JOURNALED if taken else None

    def _stride(self, most: int, in_flight_end_s: float | None) -> int:
        """Take up to `most` steps and return their number."""
        scheduler, due_s = self._scheduler, self._client.next_time()
        columns = scheduler.columns
        computed = columns.computed()
        times = pace(self._clock, self._cost, len(computed), int(computed.sum()), most, in_flight_end_s)
        steps = most if due_s is None else int(np.searchsorted(times.turns, due_s))
        dealt = scheduler.dealer.deal(columns, steps) if self._leaps and steps else None
        if dealt is None:
            free = self._walk(times, steps)
        else:
            free = dealt.free
            columns.table[TOKENS] += steps
            self._journal.add_evictions(times.starts, dealt.evicted, free)
        if len(free):
            self._write(times, free, computed)
        return len(free)

    def _walk(self, times: Pace, steps: int) -> Ints:
        """Give rows what they need, step by step, until vLLM must decide one. Return the free blocks of each step."""
        scheduler, pool, journal = self._scheduler, self._pool, self._journal
        columns = scheduler.columns
        table, begun = columns.table, columns.table[TOKENS].copy()
        due = [(max(0, wait), i) for i, wait in enumerate((table[DUE] - begun).tolist())]
        heapify(due)
        free = np.full(steps, pool.get_num_free_blocks(), np.int64)
        placed: dict[int, dict[str, BlockIds | None]] = {}
        while due[0][0] < steps:
            step, rows = due[0][0], []
            while due and due[0][0] == step:
                rows.append(heappop(due)[1])
            table[TOKENS] = begun + step
            self._clock.now_s = float(times.turns[step])
            new_blocks = scheduler.place_rows(rows)
            if new_blocks is None:
                steps = step
                break
            placed[step] = new_blocks
            scheduler.kv_cache_manager.take_boundary_state_offloads()
            free[step:] = pool.get_num_free_blocks()
            journal.add_pool_changes(float(times.starts[step]), int(free[step]))
            for i in rows:
                heappush(due, (step + max(1, int(table[DUE, i] - table[TOKENS, i])), i))
        table[TOKENS] = begun + steps
        if journal.keeps_digests:
            names, computed = columns.names, begun + (columns.ahead - 1)
            for step in range(steps):
                new_ids = [*map(placed.get(step, {}).get, names)]
                decoded = DecodedRows(new_ids, (computed + step).tolist())
                journal.digests.append(digest(BulkStep(dict.fromkeys(names, 1), (), decoded)))
        return free[:steps]

    def _write(self, times: Pace, free: Ints, computed: Ints) -> None:
        """Write the steps of a stride, each of which decoded all rows, and set the clock."""
        journal, scheduler, clock = self._journal, self._scheduler, self._clock
        indexes = scheduler.columns.table[INDEX]
        taken, count, context = len(free), len(indexes), int(computed.sum())
        ends, answers = times.ends[:taken], times.answers[:taken]
        clock.now_s, clock.device_free_s = float(answers[-1]), float(ends[-1])
        journal.output[indexes] += taken
        if journal.keeps_tokens:
            journal.token_request.frombytes(np.tile(indexes.astype("i4"), taken).tobytes())
            journal.token_s.frombytes(np.repeat(answers, count).tobytes())
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        contexts = context + count * np.arange(taken)
        journal.add_steps(times.starts[:taken], ends, count, 0, count, running, waiting, free, contexts, 0)
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

    `observed`: an observer listens to the pool. Leaps are off then: they change the pool without naming a request.
    `single_steps`: an observer must see every single step, so strides are left out, too.
    """
    # To space prefills, vLLM counts single steps; a step with draft tokens is no plain decode.
    counted = prefill_interval(engine.scheduler) > 1 or bool(engine.scheduler.num_spec_tokens)
    scheduler = None
    if (
        settings.shortcuts
        and not counted
        and not single_steps
        and isinstance(engine.model_executor, SimExecutor)
    ):
        batches = 1 if engine.batch_queue is None else engine.batch_queue_size
        scheduler = adopt_columns(engine.scheduler, batches=batches, digests=settings.digests)
    if scheduler is None:
        return (EngineStepper(engine),)
    journal.preempted.settle = scheduler.leave_columns
    leaps = not (settings.digests or observed)  # digests are of single steps
    strider = StrideStepper(engine, scheduler, client, clock, journal, leaps=leaps)
    return (strider, ColumnStepper(engine, scheduler))
