"""Loads with time in them: a server that is never idle for minutes, whose requests break off, take 30 s, are preempted.

The server schedules as vLLM does: requests in their order, up to a number of tokens a step, each whole block an event.
It counts the truth itself. A look comes every 0.1 to 15 s.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec
import pytest

from kvtune.servers.watch.events import Batch, Received, Removed, Stored
from kvtune.servers.watch.metrics import Scrape
from kvtune.servers.watch.watched import Watched
from tests.servers.watch.played import Unconnected

SIZE = 16
STEP_S = 0.1
LATE_S = 0.15
ANSWER_STEPS = 5
"""Steps that an answer takes after its prompt."""


@dataclass
class Asked:
    """A request. `breaks`: tokens of its prompt after which its client goes away; -1: it does not."""

    names: list[int]
    length: int
    breaks: int = -1
    done: int = -1
    """Tokens that are hit or computed; -1: it has not been scheduled."""
    answer: int = ANSWER_STEPS


@dataclass
class Server(Unconnected):
    """A pool without end. `budget`: tokens of a step, at least 256, as those that cut prompts are."""

    budget: int
    now: float = 1000.0
    started: float = 900.0
    waiting: deque[Asked] = field(default_factory=deque)
    running: list[Asked] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    truth: Counter[str] = field(default_factory=Counter)
    held: set[int] = field(default_factory=set)
    batches: list[Received] = field(default_factory=list)
    recomputed: int = 0
    answered: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def step(self) -> None:
        """Compute up to `budget` tokens: those of running prompts first, then those of waiting ones."""
        self.now += STEP_S
        left, events = self.budget, []
        for asked in list(self.running):
            if asked.done < asked.length:
                left -= self.compute(asked, left, events)
            elif asked.answer > 0:
                asked.answer -= 1
            else:
                self.running.remove(asked)
        while self.waiting and left > 0:
            asked = self.waiting.popleft()
            hit = next((n for n, name in enumerate(asked.names) if name not in self.held), len(asked.names))
            hit = min(hit, (asked.length - 1) // SIZE)
            asked.done = hit * SIZE
            self.counts.update(prefix_cache_queries=asked.length, prefix_cache_hits=asked.done)
            self.running.append(asked)
            left -= self.compute(asked, left, events)
        if events:
            self.batches.append(Received(0, Batch(self.now, events)))

    def compute(self, asked: Asked, left: int, events: list[Stored | Removed]) -> int:
        upto = min(asked.length, asked.done + left)
        stops = 0 <= asked.breaks <= upto
        upto = max(asked.done, min(upto, asked.breaks)) if stops else upto
        first, last = asked.done // SIZE, upto // SIZE
        self.store(asked, first, last, events)
        self.truth["cold"] += SIZE * (last - first)
        computed, asked.done = upto - asked.done, upto
        if stops:
            self.running.remove(asked)
            self.truth["aborted"] += asked.length - SIZE * last
        elif upto == asked.length:
            self.truth["tails"] += asked.length - SIZE * last
            self.counts.update(prompt_tokens=asked.length, time_to_first_token_seconds_count=1)
            self.answered.append(asked)
        return computed

    def store(self, asked: Asked, first: int, last: int, events: list[Stored | Removed]) -> None:
        if last <= first:
            return
        names = asked.names[first:last]
        self.held |= set(names)
        stored = {
            "type": "BlockStored",
            "block_hashes": names,
            "token_ids": [(name * 31 + n) % 50_000 for name in names for n in range(SIZE)],
            "block_size": SIZE,
            "parent_block_hash": asked.names[first - 1] if first else None,
        }
        events.append(msgspec.convert(stored, Stored))

    def preempt(self, asked: Asked) -> None:
        """Lose the blocks of a prompt, and compute them again: events that no counter has."""
        self.now += STEP_S
        self.batches.append(Received(0, Batch(self.now, [Removed(block_hashes=[*asked.names])])))
        self.counts["num_preemptions"] += 1
        for first in range(0, len(asked.names), self.budget // SIZE):
            last = min(len(asked.names), first + self.budget // SIZE)
            events: list[Stored | Removed] = []
            self.now += STEP_S
            self.store(asked, first, last, events)
            self.recomputed += SIZE * (last - first)
            self.batches.append(Received(0, Batch(self.now, events)))

    def scrape(self) -> Scrape:
        zeros = dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens"), 0.0)
        zeros |= {"time_to_first_token_seconds_count": 0.0}
        gauges = {"num_requests_running": len(self.running), "num_requests_waiting": len(self.waiting)}
        return Scrape(self.now, {**zeros, **self.counts, **gauges}, {}, started=self.started)

    def take(self) -> list[Received]:
        """Events come LATE_S after their step, counters at once."""
        came = [received for received in self.batches if received.batch.ts <= self.now - LATE_S]
        self.batches = self.batches[len(came) :]
        return came


def load(kind: str, server: Server, draw: random.Random) -> list[tuple[float, Asked]]:
    """Return when each request comes, for three minutes."""
    made, blocks = [], iter(range(1, 1 << 30))
    shared = [next(blocks) for _ in range(20)]
    second = server.budget / STEP_S
    at = 0.0
    while at < 180:
        length = draw.randrange(20, 60) * SIZE + draw.randrange(SIZE)
        if kind == "long" and len(made) % 40 == 20:
            length = int(25 * second) + draw.randrange(SIZE)
        count = length // SIZE
        own = [*shared, *(next(blocks) for _ in range(count))][:count] if draw.random() < 0.5 else None
        names = own or [next(blocks) for _ in range(count)]
        breaks = draw.randrange(length) if kind == "aborts" and len(made) % 9 == 4 else -1
        made.append((at, Asked(names, length, breaks)))
        at += length / second * (0.9 if kind != "idle" else 3.0)
    return made


@pytest.mark.parametrize(
    "every_s", [0.5, 15.0, *(pytest.param(each, marks=pytest.mark.full) for each in (0.1, 1.0))]
)
@pytest.mark.parametrize("kind", ["idle", "aborts", "long", "preempted"])
def test_after_minutes_without_rest_every_token_has_its_cause(kind: str, every_s: float) -> None:
    draw = random.Random(f"{kind} {every_s}")
    server = Server(512)
    watched = Watched(server)  # type: ignore[arg-type]
    watched.reader = server  # type: ignore[assignment]
    start, due, coming = server.now, server.now, deque(load(kind, server, draw))
    watched.look()
    windows = []
    while coming or server.waiting or server.running:
        while coming and start + coming[0][0] <= server.now:
            server.waiting.append(coming.popleft()[1])
        server.step()
        if kind == "preempted" and server.answered and draw.random() < 0.005:
            server.preempt(server.answered[-1])
        if server.now >= due + every_s:
            due = server.now
            shot = watched.look()
            windows.append(shot.periods["10 s"])
            for period in shot.periods.values():
                assert sum(period.misses.values()) == period.query_tokens - period.hit_tokens
                assert min(period.misses.values(), default=0) >= 0
            assert shot.periods["since start"].misses.get("cold", 0) <= server.truth["cold"]
    for _ in range(3):
        server.now += 15
        watched.look()
    period = watched.snapshot().periods["since start"]
    assert (period.query_tokens, period.hit_tokens) == (
        server.counts["prefix_cache_queries"],
        server.counts["prefix_cache_hits"],
    )
    told = Counter(period.misses)
    # A chunk of one new block may be the answer's: it is no event, and its tokens are in tails.
    twice = told["computed_twice"] + told["last_token"]  # of a beginning that two prompts compute at once
    single = server.truth["cold"] - told["cold"] - twice
    assert 0 <= single <= SIZE * len(server.answered) and single % SIZE == 0, (told, server.truth)
    again = told["evicted"]  # of what was computed again, in the place of tails: a note says so
    assert period.recomputed + again == server.recomputed and again <= server.truth["tails"]
    assert bool(server.recomputed) == any("may count as evicted" in note for note in watched.snapshot().notes)
    assert told["tails"] + told["aborted"] + again == server.truth["tails"] + server.truth["aborted"] + single
    assert kind == "aborts" or told["tails"] + again == server.truth["tails"] + single
    assert told.total() == told["cold"] + told["tails"] + told["aborted"] + twice + again
    # No window is left to what broke off long before.
    asked = sum(window.query_tokens - window.hit_tokens for window in windows)
    open_ = sum(window.misses.get("computing", 0) for window in windows)
    assert kind == "long" or open_ <= 0.35 * asked, (open_, asked)
