"""Plays a workload against one simulated engine: sends requests as they are due, steps the engine, keeps the journal.

`Replica` is the engine's side, of which a fleet (fleet.py) has several; `Player` sends one of them a whole workload.
Runs in a simulator process (worker.py), or in any process that may import vLLM. `kvtune.lab.feed` decides when
requests may be sent, as for the real engine's driver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvtune.base.errors import KvtuneError
from kvtune.lab.setup.setup import Simulated
from kvtune.lab.sim.build import uncollected
from kvtune.lab.sim.clock import VirtualClock
from kvtune.lab.sim.engine_types import EngineCore, Observer, ReplayProgress
from kvtune.lab.sim.fast.stride import steppers
from kvtune.lab.sim.journal import ReplayJournal
from kvtune.lab.sim.requests import Factory
from kvtune.lab.sim.steps import ExecutedStep, StepResult, hidden_of
from kvtune.lab.sim.transport import Client, Transport
from kvtune.plugin.probe.work import digest
from kvtune.plugin.vllm.names import hash_lookahead
from kvtune.plugin.vllm.types import Request
from kvtune.requests.types import Workload

POLL_S = 0.05
"""Seconds between two checks whether to stop."""

PROGRESS_S = 0.25

STALLED_STEPS = 3
"""After more than this many steps without a scheduled token, the clock skips to the next arrival or copy's end."""

INTERRUPTED = "interrupted"


class Replica:
    """One simulated engine in a replay, with its clock and journal. Subclasses may override `send` and `take`."""

    def __init__(
        self,
        workload: Workload,
        settings: Simulated,
        engine: EngineCore,
        clock: VirtualClock,
        client: Client,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.workload, self.engine, self.clock = workload, engine, clock
        self.finished = 0
        self._client, self._observers = client, observers
        scheduler = engine.scheduler
        caching = bool(scheduler.kv_cache_manager.enable_caching)
        self.factory = Factory(
            workload.requests, scheduler.hash_block_size, caching, hash_lookahead(scheduler)
        )
        self.journal = ReplayJournal(
            len(workload.requests),
            scheduler,
            clock,
            token_rows=workload.output_tokens <= settings.token_rows,
            digests=settings.digests,
        )
        self._steppers = steppers(
            engine,
            settings,
            client,
            clock,
            self.journal,
            observed=bool(observers),
            single_steps=any(observer.needs_single_steps for observer in observers),
        )
        self._stalled_steps = 0
        engine.model_executor.on_step = self._executed

    @property
    def busy(self) -> bool:
        """Whether the engine has requests, or a step whose result it has not taken."""
        return self.engine.scheduler.has_requests() or bool(self.engine.batch_queue)

    def begin(self) -> None:
        for observer in self._observers:
            observer.started(self.engine)

    def send(self, index: int, sent_s: float) -> None:
        self.add(index, self.factory.make(index, sent_s), sent_s)

    def add(self, index: int, request: Request, sent_s: float) -> None:
        """Give the engine a request."""
        self.journal.sent_s[index] = sent_s
        for observer in self._observers:
            observer.sent(index, request)
        self.engine.add_request(request)

    def turn(self) -> None:
        """Make a step, or several at once, and write what it made to the journal."""
        began_s = self.clock.now_s
        result = self._step()
        self.journal.add_copies(began_s)
        made = self.take(result)
        for observer in self._observers:
            observer.stepped(self.engine, result.outputs)
        self._check_for_stall(made or result.executed)

    def _step(self) -> StepResult:
        for stepper in self._steppers:
            result = stepper.try_step()
            if result is not None:
                return result
        raise AssertionError("the last stepper always steps")

    def take(self, result: StepResult) -> bool:
        """Write a step's outputs to the journal; return whether there are any."""
        journal, now = self.journal, self.clock.now_s
        made, counted = False, 0
        if result.decoded is not None:
            made, counted = True, result.decoded.with_output
            journal.add_decoded(result.decoded.indexes, now)
        for batch in (result.outputs or {}).values():
            for output in batch.outputs:
                made = True
                index = int(output.request_id)
                new = len(output.new_token_ids) if not counted else 0
                counted = max(0, counted - 1)
                if output.prefill_stats is not None:
                    journal.hits[index] = output.prefill_stats.num_cached_tokens
                    journal.tier_hits[index] = output.prefill_stats.num_external_cached_tokens
                if new:
                    if journal.output[index] == 0:
                        journal.first_s[index] = now
                    journal.output[index] += new
                    if journal.keeps_tokens:
                        journal.add_tokens(index, new, now)
                if output.events:
                    journal.preemptions[index] += sum(
                        event.type.name == "PREEMPTED" for event in output.events
                    )
                if output.finish_reason is not None:
                    self._finish(index, now)
        return made

    def _finish(self, index: int, now_s: float) -> None:
        self.journal.finished_s[index] = now_s
        self.journal.preempted.finished(str(index))
        self.finished += 1
        self._client.finished(index, now_s)
        for observer in self._observers:
            observer.finished(index)

    def _executed(self, step: ExecutedStep) -> None:
        """Write one batch to the journal. The executor calls this for each batch that it runs."""
        journal, scheduler = self.journal, self.engine.scheduler
        if journal.keeps_digests:
            hidden = hidden_of(step.scheduled)
            whole = None if hidden is None else hidden.whole
            journal.digests.append(digest(whole or step.scheduled))
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        journal.add_step(step, len(scheduler.running), len(scheduler.waiting), free)

    def _check_for_stall(self, progressed: bool) -> None:
        """After STALLED_STEPS idle steps, advance to the next event: an arrival, or the end of a copy.

        Raise KvtuneError if there is no event.
        """
        self._stalled_steps = 0 if progressed else self._stalled_steps + 1
        if self._stalled_steps <= STALLED_STEPS:
            return
        tier = self.engine.model_executor.tier
        events = (self._client.next_time(), None if tier is None else tier.copies.next_end_s())
        due = min((time_s for time_s in events if time_s is not None), default=None)
        if due is None or due <= self.clock.now_s:
            waiting = next(iter(self.engine.scheduler.waiting), None)
            name = "?" if waiting is None else self.workload.requests[int(waiting.request_id)].id
            raise KvtuneError(
                f"request {name} can never be scheduled: the pool is too small for it",
                "give the engine more blocks, or a shorter workload",
            )
        self.clock.advance_to(due)
        self._stalled_steps = 0


class Pulse:
    """Tells the caller of a replay how far it is, and asks whether to stop, a few times a second."""

    def __init__(
        self,
        requests: int,
        progress: Callable[[ReplayProgress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self._requests, self._progress, self._stop = requests, progress, stop
        self._began_s = self._polled_s = self._reported_s = time.monotonic()

    def stopped(self, finished: int, virtual_s: float) -> bool:
        """Whether the caller wants the replay to end. Also reports progress."""
        now = time.monotonic()
        if now - self._polled_s < POLL_S:
            return False
        self._polled_s = now
        if self._stop is not None and self._stop():
            return True
        if self._progress is not None and now - self._reported_s >= PROGRESS_S:
            self._reported_s = now
            self._progress(ReplayProgress(finished, self._requests, virtual_s, now - self._began_s))
        return False


class Player(Replica):
    """Plays a workload once on one engine."""

    def __init__(
        self,
        workload: Workload,
        settings: Simulated,
        engine: EngineCore,
        clock: VirtualClock,
        observers: Sequence[Observer] = (),
        progress: Callable[[ReplayProgress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self._transport = Transport(workload, settings.cost, settings.requests)
        super().__init__(workload, settings, engine, clock, self._transport, observers)
        self._requests = len(settings.requests) or len(workload.requests)
        self._end_s = settings.end_s or math.inf
        self._progress, self._stop = progress, stop

    def play(self) -> str:
        """Run the replay. Return why it ended early, or ""."""
        self.begin()
        with uncollected():
            try:
                return self._play(Pulse(self._requests, self._progress, self._stop))
            except KeyboardInterrupt:
                return INTERRUPTED

    def _play(self, pulse: Pulse) -> str:
        transport, clock = self._transport, self.clock
        while True:
            for index, sent_s in transport.arrivals(clock.now_s):
                self.send(index, sent_s)
            if transport.done or clock.now_s >= self._end_s:
                return ""
            if not self.busy:
                clock.advance_to(transport.next_arrival())
                continue
            if pulse.stopped(self.finished, clock.now_s):
                return INTERRUPTED
            self.turn()
