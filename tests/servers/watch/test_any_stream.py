"""For any stream of events and counters: causes and hits add up, nothing falls, and complete means true."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.servers.watch.events import Batch, Cleared, Received, Removed, Stored
from kvtune.servers.watch.metrics import Scrape
from kvtune.servers.watch.watched import Watched
from tests.choice import drawn
from tests.servers.watch.played import Unconnected

SIZE = 128
CHUNK = 3
"""Blocks that a step computes at most."""


@dataclass
class Server(Unconnected):
    """A server with one full-attention group and an LRU pool, which knows the cause of each of its misses.

    It plays the reader of its events, too.
    """

    pool: int
    truth: Counter[str] = field(default_factory=Counter)
    """Missed tokens of the life that runs, by cause."""
    counts: Counter[str] = field(default_factory=Counter)
    held: list[int] = field(default_factory=list)
    """The pool's blocks, least recently used first; a block may be held twice."""
    computed: set[int] = field(default_factory=set)
    reset: set[int] = field(default_factory=set)
    """Blocks that the last resets lost, and that were not stored again."""
    waiting: list[Received] = field(default_factory=list)
    started: float = 100.0
    at: float = 1000.0
    running: int = 0
    fresh: bool = False
    loses: int = 0
    names: dict[tuple[int | None, int, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def chain(self, words: list[int], salt: str) -> list[int]:
        names, parent = [], None
        for word in words:
            parent = self.names.setdefault((parent, word, salt), len(self.names) + 1)
            names.append(parent)
        return names

    def ask(self, words: list[int], tail: int, salt: str, look: Any) -> None:
        names, length = self.chain(words, salt), SIZE * len(words) + tail
        other = self.chain(words, "b" if salt == "a" else "a")
        live = _upto(names, set(self.held))
        hit = min(live, max(0, length - 1) // SIZE)
        edges = {"last_token": live}
        edges["reset"] = max(live, _upto(names, {*self.held, *self.reset}))
        edges["evicted"] = max(edges["reset"], _upto(names, self.computed))
        edges["other_salt"] = max(edges["evicted"], _upto(other, self.computed))
        edges["cold"] = len(names)
        at = hit
        for cause, end in edges.items():
            self.truth[cause] += SIZE * max(0, end - at)
            at = max(at, end)
        self.truth["tails"] += tail
        self.counts.update(prefix_cache_queries=length, prefix_cache_hits=SIZE * hit)
        self.running = 1
        for name in names[:hit]:
            self.held.remove(name)
            self.held.append(name)
        for start in range(hit, len(names), CHUNK):
            self.compute(names, words, salt, start, min(len(names), start + CHUNK))
            look()
        self.running = 0
        self.counts.update({"prompt_tokens": length, "time_to_first_token_seconds_count": 1})

    def compute(self, names: list[int], words: list[int], salt: str, start: int, end: int) -> None:
        over = max(0, len(self.held) + end - start - self.pool)
        gone, self.held = self.held[:over], self.held[over:]
        events: list[Any] = [Removed(block_hashes=[name]) for name in gone]
        self.reset -= {*gone, *names[start:end]}
        self.held += names[start:end]
        self.computed |= set(names[start:end])
        stored = {
            "type": "BlockStored",
            "block_hashes": names[start:end],
            "token_ids": [1000 * word + at for word in words[start:end] for at in range(SIZE)],
            "block_size": SIZE,
            "parent_block_hash": names[start - 1] if start else None,
            "extra_keys": None if start else [[salt], *[None] * (end - start - 1)],
        }
        self.publish([*events, msgspec.convert(stored, Stored)])

    def publish(self, events: list[Any]) -> None:
        self.at += 0.001
        received = Received(0, Batch(self.at, events), self.fresh)
        if self.loses:
            self.loses -= 1
            self.streams[0].lost += 1
            return
        self.fresh = False
        self.waiting.append(received)

    def clear(self) -> None:
        self.reset |= set(self.held)
        self.held.clear()
        self.publish([Cleared()])

    def restart(self) -> None:
        self.at += 10.0
        self.started = self.at
        for known in (self.held, self.computed, self.reset, self.truth, self.counts):
            known.clear()
        self.fresh = True

    def scrape(self) -> Scrape:
        self.at += 1.0
        zeros = dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens"), 0.0)
        zeros |= {"time_to_first_token_seconds_count": 0.0, "num_requests_waiting": 0.0}
        values = {**zeros, **self.counts, "num_requests_running": float(self.running)}
        return Scrape(self.at, values, {}, started=self.started)

    def take(self) -> list[Received]:
        came, self.waiting = self.waiting, []
        return came


def _upto(names: list[int], known: set[int]) -> int:
    return next((at for at, name in enumerate(names) if name not in known), len(names))


WORDS = st.lists(st.integers(0, 2), min_size=0, max_size=8)
ASK = st.tuples(
    st.just("ask"),
    WORDS,
    st.one_of(st.just(0), st.integers(1, SIZE - 1)),
    st.sampled_from("ab"),
    st.booleans(),
)
OTHER = st.tuples(st.sampled_from(["look", "look", "reset", "restart", "lose"]))


@settings(deadline=None, max_examples=drawn(100))
@given(st.integers(8, 16), st.lists(st.one_of(ASK, ASK, ASK, OTHER), max_size=25))
def test_causes_and_hits_add_up_nothing_falls_and_complete_is_true(pool: int, steps: list[Any]) -> None:
    server = Server(pool)
    watching = Watched(server)  # type: ignore[arg-type]
    watching.reader = server  # type: ignore[assignment]
    before: list[Counter[str]] = []

    def look() -> None:
        shot = watching.look()
        for period in shot.periods.values():
            assert sum((period.misses or {}).values()) == period.query_tokens - period.hit_tokens
            assert min((period.misses or {"": 0}).values(), default=0) >= 0
        totals = watching.totals
        now = Counter({**totals.missed, "q": totals.queries, "h": totals.hits, "r": totals.recomputed})
        assert not before or before[-1] <= now
        before.append(copy.copy(now))

    look()
    for kind, *more in steps:
        if kind == "ask":
            words, tail, salt, looks = more
            server.ask(words, tail or int(not words), salt, look if looks else lambda: None)
        elif kind == "look":
            look()
        elif kind == "reset":
            server.clear()
        elif kind == "restart":
            look()
            server.restart()
            look()
        else:
            server.loses += 1
    for _ in range(3):
        look()
    shot = watching.snapshot()
    if not shot.events.complete:
        return
    period = shot.periods["since start"]
    assert (period.query_tokens, period.hit_tokens) == tuple(
        server.counts[f"prefix_cache_{name}"] for name in ("queries", "hits")
    )
    told = Counter(period.misses)
    assert told["reset"] == server.truth["reset"], (told, server.truth)
    # In a full pool the block of the last token may be evicted by its own computation.
    last = ("evicted", "last_token")
    assert sum(told[cause] for cause in last) == sum(server.truth[cause] for cause in last)
    assert server.truth["evicted"] <= told["evicted"], (told, server.truth)
    # A chunk of one new block may be the answer's: it is no event.
    new = ("cold", "other_salt", "tails")
    assert all(told[cause] <= server.truth[cause] for cause in new[:2]), (told, server.truth)
    assert sum(told[cause] for cause in new) == sum(server.truth[cause] for cause in new)
    single = told["tails"] - server.truth["tails"]
    assert 0 <= single <= SIZE * server.counts["time_to_first_token_seconds_count"]
    assert not told["unknown"] and not told["computing"] and not period.recomputed


@pytest.mark.parametrize("blocks", [3, 60, 300])
def test_a_prompt_is_never_said_to_be_computed_before_it_is(blocks: int) -> None:
    """A look of 1 s after each step: the longest prompt takes 100 s, and nothing of it ever waits in vain."""
    server = Server(blocks + 20)
    watching = Watched(server)  # type: ignore[arg-type]
    watching.reader = server  # type: ignore[assignment]
    watching.look()
    shots = []
    server.ask([n % 3 for n in range(blocks)], 5, "a", lambda: shots.append(watching.look()))
    for shot in shots:
        misses = shot.periods["since start"].misses or {}
        assert set(misses) <= {"cold", "computing"}, misses
    shots += [watching.look() for _ in range(12)]
    period = shots[-1].periods["since start"]
    assert period.misses == {"cold": blocks * SIZE, "tails": 5} and period.recomputed == 0
