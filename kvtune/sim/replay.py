"""Replays a workload through vLLM's own EngineCore, scheduler, coordinator and pool on a virtual clock.

Runs in a simulator process (worker.py), or in any process that may import vLLM. Requests are sent as
`kvtune.workload.feed` says, like the real driver's. Observers see the engine before the first step and every request,
step and finish; they must not change anything.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvtune.errors import KvtuneError
from kvtune.probe.digest import digest
from kvtune.probe.pool import PoolWatch
from kvtune.run.types import Run
from kvtune.sim.build import build
from kvtune.sim.clock import VirtualClock, policies_see
from kvtune.sim.fast.jump import Jumper
from kvtune.sim.fast.mixed import Mixer
from kvtune.sim.fast.stride import Strider
from kvtune.sim.front_end import FrontEnd
from kvtune.sim.journal import ReplayJournal
from kvtune.sim.record import record
from kvtune.sim.requests import Factory
from kvtune.sim.settings import SimSettings
from kvtune.sim.verdicts.observer import Watch
from kvtune.workload.types import Workload

PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """`eta_s` is by finished requests; None before the first."""

    finished: int
    requests: int
    virtual_s: float
    elapsed_s: float

    @property
    def eta_s(self) -> float | None:
        return self.elapsed_s * (self.requests / self.finished - 1) if self.finished else None


class Observer(Protocol):
    """Looks on while a replay runs. `index` is a request's place in the workload."""

    def started(self, engine: Any) -> None:
        """EngineCore is built; nothing has been sent."""

    def sent(self, index: int, request: Any) -> None:
        """vLLM's Request, before the scheduler has it."""

    def stepped(self, engine: Any, outputs: Any) -> None:
        """A step of EngineCore is over; `outputs` as EngineCore returned it."""

    def finished(self, index: int) -> None:
        """The request has its last token."""


def replay(
    workload: Workload,
    settings: SimSettings,
    *,
    observers: Sequence[Observer] = (),
    progress: Callable[[ReplayProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    command: Sequence[str] = (),
) -> Run:
    """The run record (source "sim") of `workload` on the simulated engine.

    `stop` is asked every few steps; on True, or KeyboardInterrupt, the record so far comes back as partial.
    """
    from kvtune.engine.host import check_fits

    started = time.monotonic()
    clock = VirtualClock()
    watch = Watch(workload) if settings.verdicts else None
    if watch is not None:
        observers = [*observers, watch]
    with policies_see(clock):
        engine = build(settings, clock)
        try:
            check_fits(workload, int(engine.vllm_config.model_config.max_model_len))
            built_s = time.monotonic() - started
            player = Player(workload, settings, engine, clock, observers, progress, stop)
            why = player.play()
            run = record(
                player.journal,
                workload,
                settings,
                engine,
                clock,
                why=why,
                startup_s=built_s,
                elapsed_s=time.monotonic() - started - built_s,
                command=command,
            )
            return run if watch is None else watch.tell(run)
        finally:
            engine.scheduler.shutdown()


class Player:
    """One pass of a workload over one simulated engine."""

    def __init__(
        self,
        workload: Workload,
        settings: SimSettings,
        engine: Any,
        clock: VirtualClock,
        observers: Sequence[Observer] = (),
        progress: Callable[[ReplayProgress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self._workload, self._engine, self._clock = workload, engine, clock
        self._observers, self._progress, self._stop = observers, progress, stop
        self._front = FrontEnd(workload, settings.cost)
        scheduler = engine.scheduler
        caching = bool(scheduler.kv_cache_manager.enable_caching)
        self._factory = Factory(workload.requests, scheduler.hash_block_size, caching)
        self._jumper = Jumper(engine, self._front, clock) if settings.mode != "exact" else None
        self._digests = settings.digests
        n = len(workload.requests)
        self._token_rows = workload.output_tokens <= settings.token_rows
        self.journal = ReplayJournal(
            hits=np.full(n, -1, "i8"),
            sent_s=np.full(n, np.nan),
            first_s=np.full(n, np.nan),
            finished_s=np.full(n, np.nan),
            output=np.zeros(n, "i8"),
            preemptions=np.zeros(n, "i4"),
        )
        self._columns = [array(kind) for kind in "ddiiiiiiqq"]
        self.journal.steps = self._columns
        self._pool = PoolWatch(scheduler.kv_cache_manager.block_pool)
        self.journal.tiers = self._pool.tiers
        # Observers of single steps get single steps.
        alone = all(isinstance(observer, Watch) for observer in observers)
        self._strider = (
            Strider(
                engine,
                self._front,
                clock,
                self.journal,
                self._pool,
                tokens=self._token_rows,
                digests=settings.digests,
                leaps=settings.mode != "exact" and not settings.digests,
            )
            if settings.shortcuts and alone and Strider.can(engine)
            else None
        )
        self._mixer = (
            Mixer(
                engine,
                self._strider,
                clock,
                self.journal,
                tokens=self._token_rows,
                digests=settings.digests,
                jumper=self._jumper,
            )
            if self._strider is not None and Mixer.can(engine)
            else None
        )
        self._finished = 0
        engine.model_executor.on_step = self._on_step

    def play(self) -> str:
        """Run to the end. Why it ended early, or ""."""
        for observer in self._observers:
            observer.started(self._engine)
        # A replay makes millions of objects and no cycles: the collector would only walk over the pool again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._loop()
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            if collecting:
                gc.enable()

    def _loop(self) -> str:
        front, clock, engine, scheduler = self._front, self._clock, self._engine, self._engine.scheduler
        begin = report = time.monotonic()
        idle = turns = 0
        strode = False
        while True:
            for index, sent_s in front.arrivals(clock.now_s):
                self._send(index, sent_s)
            if front.done:
                break
            if not scheduler.has_requests() and not engine.batch_queue:
                due = front.next_time()
                if due is None:
                    raise KvtuneError(
                        "the replay has nothing to do and is not done", "report this with the workload"
                    )
                clock.advance_to(due)
                continue
            turns += 1
            if strode or turns % 64 == 0:
                if self._stop is not None and self._stop():
                    return "interrupted"
                now = time.monotonic()
                if self._progress is not None and now - report >= PROGRESS_S:
                    report = now
                    self._progress(
                        ReplayProgress(self._finished, len(self._workload.requests), clock.now_s, now - begin)
                    )
            mixed = self._mixer.run() if self._mixer is not None else None
            if mixed is not None:
                strode = not self._take(mixed)
                idle = 0
                continue
            strode = self._strider is not None and self._strider.run()
            if strode:
                idle = 0
                continue
            # What a stride does not take, a jump may: where requests wait in vain, or layers keep states.
            jumper = self._jumper
            if jumper is not None and self._strider is not None and not scheduler.waiting:
                jumper.rest()
                jumper = None
            if jumper is not None:
                jumper.prepare()
            outputs, executed = engine.step_fn()
            engine.post_step(executed)
            if jumper is not None:
                jumper.settle(outputs)
            made = self._take(outputs)
            for observer in self._observers:
                observer.stepped(engine, outputs)
            idle = 0 if executed or made else idle + 1
            if idle > 3 and not self._unstick():
                raise KvtuneError(self._stuck(), "give the engine more blocks, or a shorter workload")
        return ""

    def _send(self, index: int, sent_s: float) -> None:
        request = self._factory.make(index, sent_s)
        self.journal.sent_s[index] = sent_s
        for observer in self._observers:
            observer.sent(index, request)
        self._engine.add_request(request)

    def _take(self, outputs: Any) -> bool:
        """Write down what a step gave; True when it gave anything."""
        if not outputs:
            return False
        journal, now = self.journal, self._clock.now_s
        ends = self._jumper.ends if self._jumper is not None else None
        made = False
        for batch in outputs.values():
            for output in batch.outputs:
                made = True
                index = int(output.request_id)
                new = len(output.new_token_ids)
                if output.prefill_stats is not None:
                    journal.hits[index] = output.prefill_stats.num_cached_tokens
                if new:
                    if journal.output[index] == 0:
                        journal.first_s[index] = ends[0] if ends else now
                    journal.output[index] += new
                    if self._token_rows and index not in journal.written:
                        if new == 1:
                            journal.token_request.append(index)
                            journal.token_s.append(now)
                        else:
                            journal.token_request.extend([index] * new)
                            journal.token_s.extend(ends or [now] * new)
                if output.events:
                    journal.preemptions[index] += sum(
                        event.type.name == "PREEMPTED" for event in output.events
                    )
                if output.finish_reason is not None:
                    journal.finished_s[index] = now
                    self._finished += 1
                    self._front.finished(index, now)
                    for observer in self._observers:
                        observer.finished(index)
        journal.written = set()
        return made

    def _on_step(self, step: Any) -> None:
        if self._digests:
            self.journal.digests.append(digest(step.output))
        scheduler = self._engine.scheduler
        ends = self._jumper.ends if self._jumper is not None else None
        requests = step.requests
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        start, context, prefill_context = step.start_s, step.context_tokens, step.prefill_context_tokens
        self.journal.pool_news(self._pool, start, free)
        for end in ends or (step.end_s,):
            tokens = step.prefill_tokens + (step.decodes if ends is None else requests)
            times = (start, end, tokens, step.prefill_tokens, requests, running, waiting, free)
            for column, value in zip(self._columns, (*times, context, prefill_context), strict=True):
                column.append(value)
            start, context = end, context + requests
        if ends is not None:
            self.journal.jumps += 1
            self.journal.jumped_steps += len(ends)

    def _unstick(self) -> bool:
        """Nothing could be scheduled: only time can help (an arrival that is due later)."""
        due = self._front.next_time()
        if due is None or due <= self._clock.now_s:
            return False
        self._clock.advance_to(due)
        return True

    def _stuck(self) -> str:
        waiting = next(iter(self._engine.scheduler.waiting), None)
        name = self._workload.requests[int(waiting.request_id)].id if waiting is not None else "?"
        return f"request {name} can never be scheduled: the pool is too small for it"
