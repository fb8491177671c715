"""Judges the requests of a log, with a server's KV events or without: each one's hit, and the cause of each miss. Pure.

    opened   when it is sent
    read     at its first stretch (blocks stored in one step): its hit ends where that begins. What the caches have of
             it then tells the causes (`Edges` of kvtune/data/tally.py). Without a stretch it hit all its whole blocks
    closed   when its answer has ended: the tokens after its hit get their causes

A stretch belongs to the running request with the same session id and tokens. Where events or the log have no session
ids, tokens alone tell; of requests with the same whole blocks the log's own counts tell which one computed them.

`seen`: computed before by the same data-parallel rank since its start. Events tell what was stored before a stretch;
of the rest of a block, prompts tell whose first token was out when this one was sent. What others tell that were under
way then, or answers that are not known, is no cause: nobody knows what they held.

Where the log has the server's own count of a hit, that is the request's hit, and kvtune's is its `estimate`. Causes are
those of the events where both are the same, else those that the log alone tells: `not_cached` is why not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from kvtune.data.tally import Edges, Tally
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.token_ids import packed
from kvtune.requests.text.divergence import Divergence
from kvtune.requests.text.earlier import Earlier, Known
from kvtune.servers.watch.blocks import NEVER, NO_SPACE, Blocks, Space, Stretch, seen_of
from kvtune.servers.watch.cache import Cache
from kvtune.servers.watch.events import Received

SLACK_S = 0.5
"""Largest difference in seconds between the client's and the server's times for a match. The tokens must agree, too."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its tokens; None: nobody tells its hit. `like`: the earlier request with the longest common prefix.

    `agrees`: tokens of that prefix. `estimate`: the hit according to kvtune; -1 if it has no estimate. `differs`:
    the earlier request, by its number, from which it diverges.
    """

    asked: Logged
    tally: Tally | None
    agrees: int
    like: str
    estimate: int = -1
    differs: Divergence | None = None
    held: int = 0
    """Tokens that another server of the fleet would have hit, when the first step of its prompt ended."""
    kept: int = 0
    """Tokens in whole blocks that any server had computed by then."""

    @property
    def exact(self) -> bool:
        """Whether kvtune's account and the server's own count of the hit are the same."""
        return self.asked.hit >= 0 and self.estimate == self.asked.hit


@dataclass(slots=True)
class Line:
    """A request of the log that has not ended. `known`: what earlier prompts tell of it.

    `hit`, `edges`: by events, once they tell where its hit ends. `done`: its tokens up to the end of its last stretch.
    """

    asked: Logged
    prompt: bytes
    known: Known
    hit: int = -1
    edges: Edges | None = None
    done: int = 0
    held: int = 0
    kept: int = 0

    def runs(self, time_s: float) -> bool:
        return (self.asked.t0 or 0.0) - SLACK_S <= time_s <= (self.asked.t1 or 0.0) + SLACK_S

    def has(self, prefix: bytes, stretch: Stretch) -> bool:
        """Whether it goes on with the blocks of a stretch after these tokens, with the first of them at least."""
        block = 4 * stretch.block_size
        whole = max(0, len(self.prompt) - len(prefix)) // block * block
        return (
            whole > 0
            and self.asked.salt == stretch.space[1]
            and self.prompt.startswith(prefix)
            and self.prompt.startswith(b"".join(stretch.tokens)[:whole], len(prefix))
        )


class Requests:
    """Judges requests. In order of time, call `open`, `first`, `add` and `close`.

    `open`: a request is sent; `first`: its first token is out; `add`: an event batch comes; `ended`: its answer has
    ended, and `close`: judge it. `cache`: what events tell, None if there are none. `size`: tokens of a block, where no
    event tells. `whole`: the server had computed nothing before the first request.
    """

    def __init__(self, cache: Cache | None, size: int = 1, *, whole: bool = True) -> None:
        self.cache = cache
        self.earlier = Earlier(whole=whole)
        self.others: Sequence[Requests] = ()
        """Those of a fleet's other servers."""
        self._open: dict[int, Line] = {}
        """The lines that have not ended, by number."""
        self._names: dict[int, str] = {}
        self._size = size
        self._stored = False
        """Whether any block was stored: without, no event tells of a hit."""
        self._fresh: set[int] = set()
        """The ranks that began anew in this life of the server."""
        self._by_session = False
        """Whether a session id of the log was one of the events': a log may have other ids."""

    @property
    def idle(self) -> bool:
        return not self._open

    def open(self, number: int, asked: Logged) -> None:
        """A request is sent; `number` is larger than those before."""
        self._names[number] = asked.name
        earlier = self.earlier.sent(number, asked.prompt, asked.salt)
        self._open[number] = Line(asked, packed(asked.prompt), earlier)

    def first(self, number: int) -> None:
        """Its prompt is computed, unless it has ended already."""
        self.earlier.cached(number)

    def anew(self, *, under_way: bool = True, whole: bool = True) -> None:
        """Begin with no prompt: the server was restarted (or, not `whole`, they are forgotten).

        `under_way`: the requests that have not ended are the new server's.
        """
        self.earlier.anew(whole=whole)
        self._names = {number: line.asked.name for number, line in self._open.items()}
        for number, line in self._open.items() if under_way else ():
            line.known = self.earlier.sent(number, line.asked.prompt, line.asked.salt)

    def join_anew(self) -> None:
        """Events come again, and not all of those before are known."""
        self.cache = Cache(complete=False)

    def add(self, received: Received) -> None:
        assert self.cache is not None
        if received.fresh:
            if not self._fresh or received.rank in self._fresh:  # the first rank of a new life
                self._fresh.clear()
                self.anew()
            self._fresh.add(received.rank)
        for stretch, blocks in self.cache.stretches(received):
            self._size, self._stored = stretch.block_size, True
            before = self.cache.before(stretch, blocks)
            prefix = b"".join(blocks.known[name].tokens for name in before)
            if (line := self._owner(prefix, stretch)) is None:
                continue
            if line.edges is None:
                line.hit = len(prefix) // 4 + self._size * blocks.loaded(stretch, before)
                self._read(line, blocks, stretch.space, stretch.step)
            line.done = len(prefix) // 4 + self._size * len(stretch.hashes)

    def _owner(self, prefix: bytes, stretch: Stretch) -> Line | None:
        """Return the request that computed a stretch after these tokens: one that goes on there, or that fits best."""
        lines = [line for line in self._running(stretch) if line.has(prefix, stretch)]
        start = len(prefix) // 4
        goes_on = next((line for line in lines if line.hit >= 0 and line.done == start), None)
        return goes_on or max(
            lines, key=lambda line: (line.hit < 0, line.asked.hit in (-1, start)), default=None
        )

    def _running(self, stretch: Stretch) -> list[Line]:
        """Return the requests of its session, if there are some; else those that may have no session there."""
        session, lines = stretch.session, list(self._open.values())
        named = [line for line in lines if session and line.asked.session == session]
        self._by_session = self._by_session or bool(named)
        strange = self._by_session and bool(session)
        return named or [
            line for line in lines if line.runs(stretch.at) and not (strange and line.asked.session)
        ]

    def seen(self, number: int) -> int:
        """Return how many tokens an earlier prompt had computed when this one was sent."""
        return line.known.edges.seen if (line := self._open.get(number)) is not None else 0

    def drop(self, number: int, *, computed: bool) -> None:
        """Forget a request that was opened; its prompt may have been `computed`, or a part of it."""
        if self._open.pop(number, None) is not None:
            self.earlier.dropped(number, computed=computed)

    def ended(self, number: int, asked: Logged) -> None:
        """Its answer has ended. `asked`: the request with what is known of it now."""
        if (line := self._open.get(number)) is None:
            return
        if (prompt := packed(asked.prompt)) != line.prompt:  # the server has told its own
            self.earlier.dropped(number, computed=False)
            line.prompt, line.known = prompt, self.earlier.sent(number, asked.prompt, asked.salt)
        line.asked = asked
        self.earlier.ended(number, asked.answer, asked.output_tokens)

    def close(self, number: int, *, by_events: bool = True) -> Answered | None:
        """Judge a request that has ended. `by_events`: all events since it was sent have come."""
        if (line := self._open.pop(number, None)) is None:
            return None
        asked, earlier, estimate = line.asked, line.known, -1
        if self.cache is not None and by_events:
            if line.edges is None:
                line.hit = len(asked.prompt) // self._size * self._size * self._stored
                self._read(line, *self._holder(line))
            estimate = line.hit
        hit = asked.hit if asked.hit >= 0 else estimate
        agrees, edges = earlier.edges.seen, line.edges
        if edges is not None and estimate == hit:
            agrees = max(agrees, edges.seen)
        else:
            edges = replace(earlier.edges, unit=self._size)
            if hit > edges.untold:  # another prompt was computed, that is not known
                edges = replace(edges, whole=False)
        return Answered(
            asked,
            edges.tally(len(asked.prompt), hit) if hit >= 0 else None,
            agrees,
            self._names.get(earlier.like, ""),
            estimate,
            earlier.differs,
            held=max(hit, line.held),
            kept=max(hit, line.held, line.kept),
        )

    def _spaces(self, salt: str) -> list[tuple[Blocks, Space]]:
        """Return each rank's blocks with each space that has this salt."""
        ranks = self.cache.blocks.values() if self.cache is not None else ()
        return [(blocks, space) for blocks in ranks if blocks.size for space in blocks.spaces(salt)]

    def _holder(self, line: Line) -> tuple[Blocks | None, Space]:
        """Return the rank and the space that hold the longest part of this prompt."""

        def live(rank: tuple[Blocks, Space]) -> int:
            blocks, space = rank
            return blocks.live(blocks.find(line.prompt, self._size, space))

        return max(self._spaces(line.asked.salt), key=live, default=(None, NO_SPACE))

    def reach(self, line: Line) -> tuple[int, int]:
        """Return the tokens of whole blocks that this server would hit now, and those that it has ever computed."""
        live = computed = 0
        for blocks, space in self._spaces(line.asked.salt):
            names = blocks.find(line.prompt, blocks.size, space)
            names = names[: (len(line.prompt) // 4 - 1) // blocks.size]
            live = max(live, blocks.live(names) * blocks.size)
            computed = max(computed, len(names) * blocks.size)
        return live, computed

    def _read(self, line: Line, blocks: Blocks | None, space: Space, step: int = NEVER) -> None:
        """Note up to where this rank, the others and other servers had a prompt when it was looked up."""
        assert self.cache is not None
        size, prompt, earlier = self._size, line.prompt, line.known.edges
        ranks = [other for other in self.cache.blocks.values() if other is not blocks]
        stored = salted = live = reset = kept = 0
        seen = 0 if ranks else earlier.seen  # the log does not tell which rank has a prompt
        if blocks is not None:
            states = blocks.states(blocks.find(prompt, size, space))
            stored = size * seen_of(states, step)
            salted = size * blocks.other_space(prompt, size, space, step)
            seen = max(seen, stored)
            live, reset, kept = blocks.reaches(states[: min(seen, len(prompt) // 4 - 1) // size])
        elsewhere = size * max((len(rank.find(prompt, size, space)) for rank in ranks), default=0)
        there = [other.reach(line) for other in self.others]
        line.held = max((held for held, _ in there), default=0)
        replica = max((computed for _, computed in there), default=0)
        line.kept = max(replica, self.reach(line)[1]) if there else 0
        parts = salted + size - 1 if salted and not earlier.whole else 0  # events tell whole blocks
        salted = max(salted, earlier.salted)
        sure, tail, untold = max(elsewhere, earlier.seen, salted), stored + size - 1, earlier.untold
        if self.cache.complete:
            if earlier.whole and stored <= max(sure, untold):
                tail = min(untold, tail) if untold > sure else 0
            untold = parts
        if earlier.whole and salted > tail:  # what another salt has for sure is no guess
            tail = 0
        line.edges = replace(
            earlier,
            unit=size,
            seen=seen,
            reset=size * reset if reset > live else 0,
            kept=size * kept,
            elsewhere=elsewhere,
            salted=salted,
            tail=tail,
            untold=untold,
            whole=earlier.whole or self.cache.complete,
            replica=replica,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What one server published, and the requests that it served.

    `restarts`: when its lives ended, where no event tells.
    """

    received: Iterable[Received]
    asked: Iterable[Logged]
    cache: Cache | None
    size: int = 1
    restarts: Iterable[float] = ()
    whole: bool = True


def join_fleet(servers: Sequence[Served]) -> list[list[Answered]]:
    """Judge the log of each server, in order of time over all of them."""
    judges = [Requests(served.cache, served.size, whole=served.whole) for served in servers]
    moments: list[tuple[float, int, int, int | Received | None]] = []
    rows = [sorted(served.asked, key=lambda row: row.t0 or 0.0) for served in servers]
    for place, served in enumerate(servers):
        judges[place].others = [other for other in judges if other is not judges[place]]
        moments += [(time_s, -1, place, None) for time_s in served.restarts]
        for number, row in enumerate(rows[place]):
            begun, first, ended = row.t0 or 0.0, row.cached_at or 0.0, row.t1 or 0.0
            last = 3 if served.cache is not None or ended <= begun else -1
            moments += [(begun, 0, place, number), (ended, last, place, number)]
            moments += [(first, 1, place, number)] if first < ended else []
        moments += [(got.batch.ts, 2, place, got) for got in served.received]
    answered: list[list[Answered]] = [[] for _ in servers]
    for _, kind, place, what in sorted(moments, key=itemgetter(0, 1)):
        requests = judges[place]
        if isinstance(what, Received):
            requests.add(what)
        elif what is None:
            requests.anew(under_way=False)
        elif kind == 0:
            requests.open(what, rows[place][what])
        elif kind == 1:
            requests.first(what)
        else:
            requests.ended(what, rows[place][what])
            if (judged := requests.close(what)) is not None:
                answered[place].append(judged)
    return answered
