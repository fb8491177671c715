"""Plays rounds of trouble on one simulated EngineCore, and looks at every output. Simulator's process only.

What is sent in which order follows from the round and from virtual time alone.

    trouble                 here
    cuts                    aborts once `after` tokens are there, also where the request has just ended
    leaves                  aborts before anything is scheduled, or within two steps
    reads, whole, slow,     read: nothing here waits for a client
    stuck
    choices                 three requests with one prompt
    stop                    with an even number a stop token that is the first to come; else another one, and the
                            front end aborts when it finds a stop string
    logprobs, sampled       sampling parameters
    json                    a plain request: without a tokenizer there is no grammar
    errors                  not sent: a front end answers them
    reset                   EngineCore's reset_prefix_cache, every second one with reset_running_requests
    pause, clock, py-spy    nothing: no part of this waits for a wall clock

Client 0 of an engine with the core reads columns, as AsyncLLM does.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from bench.soak.million_engine import Built
from bench.soak.million_messages import Messages, stops_first
from bench.soak.trouble import ERRORS, Ask, Round
from kvtune.lab.sim.clock import policies_see
from kvtune.lab.sim.fast.stride import steppers
from kvtune.lab.sim.journal import STEP_COLUMNS, ReplayJournal
from kvtune.lab.sim.steps import ExecutedStep, StepResult, hidden_of
from kvtune.plugin.core.outputs.message import MARK, asking, columns_of
from kvtune.plugin.probe.work import digest
from kvtune.plugin.vllm.types import Request

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

FIRST_ID = 1_000_000
"""Ids of requests are numbers from here on, so that none is a number of anything else."""
STALLED = 8
"""Turns without any work, after which only an arrival can help."""
CHOICES = 3


class Broken(Exception):
    """Something that must hold after or within a round does not."""


@dataclass(slots=True)
class Sent:
    ask: Ask
    tokens: int
    """How many are asked for."""
    turns_left: int = -1
    """Of a client that leaves."""


@dataclass(slots=True)
class Played:
    """What a round came to. Columns are by request, in the order of sending; -1: not seen."""

    ids: range
    requests: int = 0
    aborted: int = 0
    preemptions: int = 0
    resets: int = 0
    steps: int = 0
    digests: array[int] = field(default_factory=lambda: array("L"))
    hits: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Until a request finished or was aborted."""
    finished_s: list[float] = field(default_factory=list)


Event = tuple[float, int, Ask | Literal["reset"]]


class Rounds:
    """One engine and its clients, from round to round."""

    def __init__(self, built: Built, seed: int) -> None:
        self.built = built
        self.engine, self.clock = built.engine, built.clock
        scheduler = self.engine.scheduler
        self.journal = ReplayJournal(0, scheduler, self.clock, token_rows=False, digests=True)
        self.journal.output = np.zeros(FIRST_ID, "i8")
        self.steppers = steppers(
            self.engine,
            built.settings.simulated,
            self,  # type: ignore[arg-type]  # they only ask it for `next_time`
            self.clock,
            self.journal,
            observed=False,
            single_steps=False,
        )
        self.engine.model_executor.on_step = self._executed
        self._slot_names: dict[int, str] = {}
        self._slots: list[int] = []
        if built.settings.core == "kvtune" and not built.settings.simulated.shortcuts:
            self.engine.engine_index = 0  # type: ignore[attr-defined]  # as in a separate process
            self.engine.abort_requests([asking(0)])  # type: ignore[attr-defined]
        self._next_id = FIRST_ID
        self._messages = Messages(seed)
        self._steps = 0
        self._events: list[Event] = []
        self._live: dict[int, Sent] = {}
        self._aborted: set[int] = set()
        self._cutting: dict[int, int] = {}
        self._leaving: list[int] = []
        self._resets = 0
        self.played = Played(range(0))

    def play(self, round_: Round) -> Played:
        """The round (or only these requests of it) to its end; Broken where an output is not as it must be."""
        self._begin(round_, round_.asks)
        with policies_see(self.clock):
            self._play()
        played, journal = self.played, self.journal
        if self._live:
            raise Broken(
                f"{len(self._live)} requests have neither ended nor been aborted: {self._first_live()}"
            )
        played.ids = range(played.ids.start, self._next_id)
        played.digests, journal.digests = journal.digests, array("L")
        played.steps = self._steps + len(journal.steps) // len(STEP_COLUMNS)
        journal.steps, self._steps = array("d"), 0
        journal.pool.clear()
        self._aborted.clear()
        return played

    def next_time(self) -> float | None:
        """When the next request or reset comes; now, while a client that will go away looks at each token."""
        running = self._running_ids() if self._cutting else set()
        if self._leaving or not running.isdisjoint(self._cutting):
            return self.clock.now_s
        return self._events[0][0] if self._events else None

    def _running_ids(self) -> set[int]:
        return {int(request.request_id) for request in self.engine.scheduler.running}

    def _begin(self, round_: Round, asks: Sequence[Ask]) -> None:
        start = self.clock.now_s
        self._two_clients = bool(round_.number // 4 % 2)
        ordered: list[Event] = [
            (start + ask.at_s, ask.number, ask) for ask in asks if ask.special not in ERRORS
        ]
        ordered += [
            (start + fault.at_s, -1 - at, "reset")
            for at, fault in enumerate(round_.faults)
            if fault.kind == "reset"
        ]
        heapq.heapify(ordered)
        self._events = ordered
        self.played = Played(range(self._next_id, self._next_id))
        most = CHOICES * len(asks)
        if self._next_id + most > len(self.journal.output):
            self.journal.output = np.concatenate((self.journal.output, np.zeros(FIRST_ID, "i8")))

    def _play(self) -> None:
        engine, clock, events = self.engine, self.clock, self._events
        scheduler, stalled = engine.scheduler, 0
        while True:
            while events and events[0][0] <= clock.now_s:
                self._happens(heapq.heappop(events)[2])
            if not scheduler.has_requests() and not engine.batch_queue:
                if not events:
                    return
                clock.advance_to(events[0][0])
                continue
            result = self._step()
            took = self._take(result)
            self._go_away()
            stalled = 0 if took or result.executed else stalled + 1
            if stalled > STALLED and scheduler.requests:
                if not events:
                    raise Broken(f"request {next(iter(scheduler.requests))} is never scheduled")
                clock.advance_to(events[0][0])
                stalled = 0

    def _step(self) -> StepResult:
        for stepper in self.steppers:
            result = stepper.try_step()
            if result is not None:
                return result
        raise AssertionError("the last stepper always steps")

    def _executed(self, step: ExecutedStep) -> None:
        self._steps += 1
        hidden = hidden_of(step.scheduled)
        self.journal.digests.append(digest(hidden.whole if hidden and hidden.whole else step.scheduled))

    def _happens(self, event: Ask | Literal["reset"]) -> None:
        if event == "reset":
            self._resets += 1
            self.played.resets += self.engine.scheduler.reset_prefix_cache(self._resets % 2 == 0)  # type: ignore[attr-defined]
            return
        for _ in range(CHOICES if event.special == "choices" else 1):
            self._send(event)

    def _send(self, ask: Ask) -> None:
        number = self._next_id
        self._next_id += 1
        engine = self.engine
        message = self._messages.of(number, ask, self.clock.now_s, ask.number % 2 if self._two_clients else 0)
        request: Request
        request, _ = engine.preprocess_add_request(message)  # type: ignore[attr-defined]
        engine.add_request(request)
        played = self.played
        played.requests += 1
        played.hits.append(-1)
        played.tokens.append(-1)
        played.finished_s.append(-1.0)
        self._live[number] = sent = Sent(ask, 1 if stops_first(ask) else ask.output)
        if ask.client == "cuts":
            self._cutting[number] = ask.after
        elif ask.special == "stop" and not stops_first(ask):
            self._cutting[number] = 1 + ask.number % ask.output
        elif ask.client == "leaves":
            sent.turns_left = ask.number % 3
            if sent.turns_left:
                self._leaving.append(number)
            else:
                self._abort([number])

    def _take(self, result: StepResult) -> bool:
        journal, played = self.journal, self.played
        took, counted = False, 0
        if result.decoded is not None:
            took, counted = True, result.decoded.with_output
            for number in result.decoded.indexes.tolist():
                self._alive(number)
                journal.output[number] += 1
        for batch in (result.outputs or {}).values():
            for output in batch.outputs:
                took = True
                if output.request_id == MARK:
                    for number in self._in_columns(output):
                        self._alive(number)
                        journal.output[number] += 1
                    continue
                number = int(output.request_id)
                sent = self._alive(number)
                journal.output[number] += 0 if counted else len(output.new_token_ids)
                counted = max(0, counted - 1)
                at = number - played.ids.start
                if output.prefill_stats is not None:
                    played.hits[at] = output.prefill_stats.num_cached_tokens
                if output.events:
                    played.preemptions += sum(event.type.name == "PREEMPTED" for event in output.events)
                if output.finish_reason is not None:
                    self._finish(number, sent, at)
        return took

    def _alive(self, number: int) -> Sent:
        sent = self._live.get(number)
        if sent is None:
            was = "aborted" if number in self._aborted else "finished or unknown"
            raise Broken(f"an output of request {number}, which is {was}")
        return sent

    def _in_columns(self, output: EngineCoreOutput) -> list[int]:
        """The requests that an output with columns gives a token each."""
        columns = columns_of(output)
        self._slot_names |= dict(columns.named)
        if columns.slots is not None:
            self._slots = columns.slots.tolist()
        if columns.counts is not None or len(columns.tokens) != len(self._slots):
            raise Broken(f"columns of {len(columns.tokens)} tokens for {len(self._slots)} requests")
        return [int(self._slot_names[slot]) for slot in self._slots]

    def _finish(self, number: int, sent: Sent, at: int) -> None:
        made = int(self.journal.output[number])
        if made != sent.tokens:
            raise Broken(f"request {number} finished with {made} tokens, not {sent.tokens}: {sent.ask}")
        del self._live[number]
        self.played.finished_s[at] = self.clock.now_s
        self.played.tokens[at] = made

    def _go_away(self) -> None:
        """Clients that have seen enough abort, before the next step."""
        going = [number for number, after in self._cutting.items() if self.journal.output[number] >= after]
        # Also of one that ended in the same step: its abort crosses the last answer.
        going += [number for number in self._cutting if number not in self._live and number not in going]
        for number in list(self._leaving):
            sent = self._live.get(number)
            if sent is not None:
                sent.turns_left -= 1
            if sent is None or sent.turns_left <= 0:
                self._leaving.remove(number)
                going.append(number)
        if going:
            self._abort(going)

    def _abort(self, numbers: Sequence[int]) -> None:
        self.engine.abort_requests([str(number) for number in numbers])  # type: ignore[attr-defined]
        for number in numbers:
            self._cutting.pop(number, None)
            if self._live.pop(number, None) is not None:
                self._aborted.add(number)
                self.played.tokens[number - self.played.ids.start] = int(self.journal.output[number])
                self.played.aborted += 1

    def _first_live(self) -> str:
        number, sent = next(iter(self._live.items()))
        return f"{number} {sent.ask}"
