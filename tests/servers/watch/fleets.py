"""Servers of a fleet that are played: drawn requests, routed, with the truth by brute force.

Each server is a prefix cache of one group (test_one_judge) that publishes events on real sockets beside a /metrics. The
truth is counted here again, slowly: from the raw events and the requests, by tuples of token ids.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import msgspec

from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.events import Batch, Received, Removed, Stored
from tests.servers.watch.played import counters, http, published
from tests.servers.watch.test_one_judge import Sent, Server

Route = Callable[[int, int], int]
"""Which server gets request number N of session S."""


@dataclass
class Truth:
    """Tokens of all requests, in the order of the funnel."""

    asked: int = 0
    routed: int = 0
    best: int = 0
    kept: int = 0


@dataclass
class Drawn:
    """What servers did for drawn requests: their batches, and the requests with their server."""

    servers: list[Server]
    sent: list[tuple[int, Sent]] = field(default_factory=list)

    def received(self, place: int) -> list[Received]:
        return [Received(0, batch) for batch in self.servers[place].batches]

    def log(self) -> list[Logged]:
        return [
            Logged(
                one.name,
                one.prompt,
                one.answer,
                one.t0,
                one.t1,
                one.hit,
                one.salt,
                kind="all",
                replica=str(place),
                line=line,
            )
            for line, (place, one) in enumerate(self.sent, 1)
        ]

    def log_at(self, urls: Sequence[str]) -> list[Logged]:
        return [replace(row, replica=urls[int(row.replica)]) for row in self.log()]

    def asked(self, place: int) -> tuple[int, int, int]:
        """The server's counters: prompt tokens, hits, requests."""
        own = [one for at, one in self.sent if at == place]
        return sum(len(one.prompt) for one in own), sum(one.hit for one in own), len(own)

    def truth(self) -> Truth:
        asked = [Asked(at, one.prompt, one.salt, one.hit, one.first) for at, one in self.sent]
        return truth(
            [server.batches for server in self.servers], [server.size for server in self.servers], asked
        )


Key = tuple[str, tuple[int, ...]]
"""Of a block: the salt, and all tokens up to its end."""


@dataclass(frozen=True)
class Asked:
    """A prompt that server `place` looked up at `at`."""

    place: int
    prompt: Sequence[int]
    salt: str
    hit: int
    at: float


@dataclass
class Held:
    """What one server has stored, rebuilt from its raw events. `windows`: of each group, None if it has none."""

    size: int
    names: dict[object, Key] = field(default_factory=dict)
    copies: Counter[tuple[int, object]] = field(default_factory=Counter)
    windows: dict[int, int | None] = field(default_factory=dict)
    known: set[Key] = field(default_factory=set)

    def play(self, batch: Batch) -> None:
        for (
            event
        ) in batch.events:  # a group that keeps some blocks does not say which: another one names them
            if isinstance(event, Stored) and len(event.block_hashes) * event.block_size == len(
                event.token_ids
            ):
                if event.parent_block_hash is None:
                    salt, before = ((event.extra_keys or [None])[0] or [""])[0], ()
                else:
                    salt, before = self.names[event.parent_block_hash]
                for n, name in enumerate(event.block_hashes, 1):
                    self.names[name] = (salt, (*before, *event.token_ids[: n * event.block_size]))
                    self.known.add(self.names[name])
        for event in batch.events:
            group = getattr(event, "group_idx", 0) or 0
            if isinstance(event, Stored):
                self.windows[group] = event.kv_cache_spec_sliding_window
                self.copies.update((group, name) for name in event.block_hashes)
            elif isinstance(event, Removed):
                self.copies.subtract((group, name) for name in event.block_hashes)
            else:
                self.copies.clear()

    def reach(self, keys: Sequence[Key]) -> tuple[int, int]:
        """How many tokens of these blocks a prompt would hit now, and how many were ever computed."""
        groups = {
            group: {self.names[name] for (of, name), n in self.copies.items() if of == group and n > 0}
            for group in self.windows
        }
        seen = next((n for n, key in enumerate(keys) if key not in self.known), len(keys))
        for end in range(seen, 0, -1):
            needs = {
                group: end if window is None else min(end, -(-(window - 1) // self.size))
                for group, window in self.windows.items()
            }
            if all(set(keys[end - need : end]) <= groups[group] for group, need in needs.items()):
                return end * self.size, seen * self.size
        return 0, seen * self.size


def truth(batches: Sequence[Sequence[Batch]], sizes: Sequence[int], asked: Sequence[Asked]) -> Truth:
    """By brute force, slowly."""
    servers = [Held(size) for size in sizes]
    rows = [(batch.ts, 1, at, batch) for at, own in enumerate(batches) for batch in own]
    found = Truth()
    for _, _, at, what in sorted(
        [*rows, *((one.at, 0, one.place, one) for one in asked)], key=lambda row: row[:2]
    ):
        if not isinstance(what, Asked):
            servers[at].play(what)
            continue
        best = kept = what.hit
        for place, server in enumerate(servers):
            ends = range(server.size, len(what.prompt), server.size)  # a hit leaves the last token out
            live, seen = server.reach([(what.salt, tuple(what.prompt[:end])) for end in ends])
            best, kept = max(best, live if place != at else 0), max(kept, seen)
        found.asked += len(what.prompt)
        found.routed += what.hit
        found.best += best
        found.kept += max(kept, best)
    return found


def drawn(
    seed: int,
    route: Route,
    *,
    sizes: Sequence[int] = (4, 4, 4),
    capacity: int = 120,
    sessions: int = 8,
    requests: int = 90,
    begin: float | None = None,
    answer: int = 3,
) -> Drawn:
    """Sessions that grow turn by turn behind a shared beginning, one request after another."""
    random_ = random.Random(seed)
    servers = [Server(size, capacity) for size in sizes]
    for number, server in enumerate(servers):  # each hashes with another seed
        server.names[("seed", (number,))] = 10_000 * (number + 1)
    made, now = Drawn(servers), begin or time.time() - 1000
    template = [random_.randrange(500) for _ in range(17)]
    texts = {
        session: [*template, *(random_.randrange(500) for _ in range(random_.randrange(5, 40)))]
        for session in range(sessions)
    }
    for number in range(requests):
        session = random_.randrange(sessions)
        text, salt = texts[session], "b" if session == 1 else ""
        now += 0.5
        one = Sent(
            f"r{number}",
            list(text),
            [random_.randrange(500) for _ in range(answer)],
            salt,
            now,
            now + 0.1,
            now + 0.3,
            True,
        )
        place = route(number, session)
        servers[place].compute(one, now + 0.1)
        servers[place].answer(one, now + 0.2)
        made.sent.append((place, one))
        if len(text) > 150 or random_.random() < 0.1:
            texts[session] = [*template, *(random_.randrange(500) for _ in range(random_.randrange(5, 40)))]
        else:
            texts[session] = [
                *text,
                *one.answer,
                *(random_.randrange(500) for _ in range(random_.randrange(0, 14))),
            ]
    return made


class Playing:
    """One server of a fleet on real sockets. It has published nothing yet."""

    def __init__(self, size: int = 4, blocks: int = 120, model: str = "tiny") -> None:
        self.publisher, self.answers = published()
        self.size, self.blocks, self.model, self.number, self.started = size, blocks, model, 0, 1.0
        self.count(0, 0, 0)

    def count(self, queries: int, hits: int, done: int) -> None:
        text = counters(queries, hits, started=self.started, done=done)
        text = text.replace('block_size="32"', f'block_size="{self.size}"')
        text = text.replace('num_gpu_blocks="200"', f'num_gpu_blocks="{self.blocks}"').replace(
            "requests_running{", "requests_running_{"
        )
        text += f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} 0.0\n'
        self.answers.paths["/metrics"] = (200, text.replace('"tiny"', f'"{self.model}"'))

    def publish(self, batches: Sequence[Batch]) -> None:
        self.publisher.publish(
            [
                (self.number + n, msgspec.msgpack.encode(batch, enc_hook=list))
                for n, batch in enumerate(batches)
            ]
        )
        self.number += len(batches)


@contextmanager
def fleet(made: Drawn) -> Iterator[tuple[list[Playing], list[str]]]:
    """Servers that will play this, and their URLs."""
    with playing_of([Playing(server.size, server.capacity) for server in made.servers]) as both:
        yield both


@contextmanager
def playing_of(playing: list[Playing]) -> Iterator[tuple[list[Playing], list[str]]]:
    """These servers, and their URLs."""
    with ExitStack() as stack:
        for one in playing:
            stack.callback(one.publisher.close)
        yield playing, [stack.enter_context(http(one.answers)) for one in playing]


def play(made: Drawn, playing: Sequence[Playing]) -> None:
    for place, one in enumerate(playing):
        one.publish(made.servers[place].batches)
        one.count(*made.asked(place))
