"""Judges the requests of a log, with a server's KV events or without: each one's hit, and the cause of each miss. Pure.

A stretch (blocks stored in one step) belongs to the running request with the same session id and tokens. Where events
or the log have no session ids, tokens alone tell. That request's hit ends where its first stretch begins. A request
without a stretch hit all its whole blocks. Of requests with the same whole blocks the log's counts tell which one
computed them. The tokens after a hit are divided by cause by `Edges` of `kvtune/data/tally.py`.

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
from kvtune.requests.log.token_ids import Prefixes, packed
from kvtune.requests.text.divergence import Divergence
from kvtune.requests.text.earlier import Earlier, Known
from kvtune.servers.watch.account import Account
from kvtune.servers.watch.blocks import NEVER, NO_SPACE, Blocks, Space, Stretch, seen_of
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
class _Open:
    asked: Logged
    prompt: bytes
    known: Known
    hit: int = -1
    done: int = 0
    rank: int = 0
    edges: Edges | None = None
    """By events; None until its first stretch came, or it has ended."""
    agrees: int = 0
    like: str = ""
    held: int = 0
    kept: int = 0


class Requests:
    """Judges requests. In order of time, call `open`, `first`, `add` and `close`.

    `open`: a request is sent; `first`: its first token is out; `add`: an event batch comes; `ended`: its answer has
    ended, and `close`: judge it. `account`: of the events, None if there are none. `size`: tokens of a block, where no
    event tells. `whole`: the server had computed nothing before the first request.
    """

    def __init__(self, account: Account | None, size: int = 1, *, whole: bool = True) -> None:
        self.account = account
        self.earlier = Earlier(whole=whole)
        self._open: dict[int, _Open] = {}
        """By number."""
        self._names: dict[int, str] = {}
        self._texts: dict[tuple[int, str], Prefixes[str]] = {}
        """By rank and cache salt, the prompts whose blocks it has stored."""
        self._computed: list[tuple[_Open, bytes]] = []
        """Prompts that were completed in this step: lookups of the next step find them."""
        self._size = size
        self._stored = False
        """Whether any block was stored: without, no event tells of a hit."""
        self._fresh: set[int] = set()
        """The ranks that began anew in this life of the server."""
        self.others: Sequence[Requests] = ()
        """Of the other servers of a fleet."""
        self._by_session = False
        """Whether a session id of the log was one of the events': a log may have other ids."""

    @property
    def idle(self) -> bool:
        return not self._open

    def open(self, number: int, asked: Logged) -> None:
        """A request is sent; `number` is larger than those before."""
        self._find()
        self._names[number] = asked.name
        known = self.earlier.sent(number, asked.prompt, asked.salt)
        self._open[number] = _Open(asked, packed(asked.prompt), known)

    def first(self, number: int) -> None:
        """Its prompt is computed, unless it has ended already."""
        self.earlier.cached(number)

    def anew(self, *, under_way: bool = True, whole: bool = True) -> None:
        """Begin with no prompt: the server was restarted (or, not `whole`, they are forgotten).

        `under_way`: the requests that have not ended are the new server's.
        """
        self.earlier.anew(whole=whole)
        self._names = {number: one.asked.name for number, one in self._open.items()}
        for number, one in self._open.items() if under_way else ():
            one.known = self.earlier.sent(number, one.asked.prompt, one.asked.salt)

    def join_anew(self) -> None:
        """Events come again, and not all of those before are known."""
        self.account = Account(complete=False)
        self._texts.clear()
        self._computed.clear()

    def add(self, received: Received) -> None:
        assert self.account is not None
        self._find()
        if received.fresh:
            for key in [key for key in self._texts if key[0] == received.rank]:
                del self._texts[key]
            if not self._fresh or received.rank in self._fresh:  # the first rank of a new life
                self._fresh.clear()
                self.anew()
            self._fresh.add(received.rank)
        for stretch, blocks in self.account.stretches(received):
            self._owner(stretch, blocks)
            self.account.take(stretch, blocks)

    def _find(self) -> None:
        """Let later lookups find the prompts that were computed so far."""
        for one, tokens in self._computed:
            key = (one.rank, one.asked.salt)
            self._texts.setdefault(key, Prefixes()).add(tokens, one.asked.name)
        self._computed.clear()

    def seen(self, number: int) -> int:
        """Return how many tokens an earlier prompt had computed when this one was sent."""
        return one.known.edges.seen if (one := self._open.get(number)) is not None else 0

    def drop(self, number: int, *, computed: bool) -> None:
        """Forget a request that was opened; its prompt may have been `computed`, or a part of it."""
        if self._open.pop(number, None) is not None:
            self.earlier.dropped(number, computed=computed)

    def ended(self, number: int, asked: Logged) -> None:
        """Its answer has ended. `asked`: the request with what is known of it now."""
        if (one := self._open.get(number)) is not None:
            if (prompt := packed(asked.prompt)) != one.prompt:  # the server has told its own
                self.earlier.dropped(number, computed=False)
                one.prompt, one.known = prompt, self.earlier.sent(number, asked.prompt, asked.salt)
            one.asked = asked
            self.earlier.ended(number, asked.answer, asked.output_tokens)

    def close(self, number: int, *, by_events: bool = True) -> Answered | None:
        """Judge a request that has ended. `by_events`: all events since it was sent have come."""
        if (one := self._open.pop(number, None)) is None:
            return None
        asked, edges, estimate = one.asked, None, -1
        if self.account is not None and by_events:
            if one.edges is None:
                whole = len(asked.prompt) // self._size * self._size * self._stored
                self._judge(one, whole, *self._held_by(one))
            if len(self.account.blocks) > 1:  # the log does not tell which rank has its answer
                self._computed.append((one, packed([*asked.prompt, *asked.answer[:-1]])))
            edges, estimate = one.edges, one.hit
        hit = asked.hit if asked.hit >= 0 else estimate
        agrees, like = one.agrees, one.like
        if edges is None or hit != estimate:
            edges = replace(one.known.edges, unit=self._size)
            if hit > edges.untold:  # another prompt was computed, that is not known
                edges = replace(edges, whole=False)
            agrees, like = edges.seen, self._names.get(one.known.like, "")
        tally = edges.tally(len(asked.prompt), hit) if hit >= 0 else None
        held, kept = max(hit, one.held), max(hit, one.held, one.kept)
        return Answered(asked, tally, agrees, like, estimate, one.known.differs, held, kept)

    def _reach(self, one: _Open) -> tuple[int, int]:
        """Return the tokens of whole blocks that this server would hit now, and those that it has ever computed."""
        live = known = 0
        for blocks in self.account.blocks.values() if self.account is not None else ():
            for space in blocks.spaces(one.asked.salt) if blocks.size else ():
                names = blocks.find(one.prompt, blocks.size, space)[
                    : (len(one.prompt) // 4 - 1) // blocks.size
                ]
                live = max(live, blocks.live(names) * blocks.size)
                known = max(known, len(names) * blocks.size)
        return live, known

    def _held_by(self, one: _Open) -> tuple[Blocks | None, Space]:
        """Return the blocks and the space that hold the longest part of this prompt; None if there is no rank."""
        assert self.account is not None
        size = self._size
        found = [
            (blocks.live(blocks.find(one.prompt, size, space)), blocks, space)
            for blocks in self.account.blocks.values()
            for space in blocks.spaces(one.asked.salt)
        ]
        best = max(found, key=itemgetter(0), default=None)
        return (None, NO_SPACE) if best is None else best[1:]

    def _owner(self, stretch: Stretch, blocks: Blocks) -> None:
        self._size = size = stretch.block_size
        self._stored = True
        before = blocks.chain(stretch.parent)
        start = 4 * size * len(before)
        prefix = b"".join(blocks.known[name].tokens for name in before)
        tokens = b"".join(stretch.tokens)
        best: _Open | None = None
        better = (False, False)
        named = [
            one for one in self._open.values() if stretch.session and one.asked.session == stretch.session
        ]
        self._by_session = self._by_session or bool(named)
        for one in named or self._open.values():
            if not named and self._by_session and stretch.session and one.asked.session:
                continue  # it is another session's
            early = (one.asked.t0 or 0.0) > stretch.at + SLACK_S
            late = (one.asked.t1 or 0.0) < stretch.at - SLACK_S
            if not named and (early or late):
                continue
            piece = one.prompt[start : start + len(tokens)]
            if not piece or not tokens.startswith(piece[: len(piece) // (4 * size) * 4 * size]):
                continue
            if len(piece) < 4 * size or one.prompt[:start] != prefix or one.asked.salt != stretch.space[1]:
                continue
            if one.hit >= 0 and one.done == start // 4:
                best = one
                break
            fits = (one.hit < 0, one.asked.hit in (-1, start // 4))
            if best is None or fits > better:
                best, better = one, fits
        if best is None:
            return
        if best.edges is None:
            hit = start // 4 + size * blocks.in_tier(stretch.hashes)
            self._judge(best, hit, blocks, stretch.space, stretch.step)
        best.done = (start + len(tokens)) // 4
        if best.done >= len(best.prompt) // 4 // size * size:
            self._computed.append((best, best.prompt))

    def _judge(self, one: _Open, hit: int, blocks: Blocks | None, space: Space, step: int = NEVER) -> None:
        assert self.account is not None
        size, length, known = self._size, len(one.prompt) // 4, one.known.edges
        one.hit = hit
        one.rank = blocks.rank if blocks is not None else 0
        texts = {key: some.longest(one.prompt) for key, some in self._texts.items()}
        same = {rank: reach for (rank, salt), reach in texts.items() if salt == one.asked.salt}
        others = [blocks_ for blocks_ in self.account.blocks.values() if blocks_ is not blocks]
        one.agrees, like = max(same.values(), key=itemgetter(0), default=(0, None))
        seen = same.get(one.rank, (0, None))[0]
        if not others and (known.seen > seen or step == NEVER):
            # Without a stretch, events do not tell when it was looked up.
            seen = one.agrees = known.seen
            like = self._names.get(one.known.like)
        one.like = like or ""
        states = blocks.states(blocks.find(one.prompt, size, space)) if blocks is not None else []
        stored = size * seen_of(states, step)
        stored_there = size * max((len(other.find(one.prompt, size, space)) for other in others), default=0)
        stored_salted = size * blocks.other_space(one.prompt, size, space, step) if blocks is not None else 0
        sure, seen = seen, max(seen, stored)
        one.agrees = max(one.agrees, seen)
        elsewhere = max((tokens for rank, (tokens, _) in same.items() if rank != one.rank), default=0)
        salted = max(
            (tokens for (_, salt), (tokens, _) in texts.items() if salt != one.asked.salt), default=0
        )
        usable = min(seen, length - 1) // size
        kept = reset = 0
        if blocks is not None:
            before = states[:usable]
            live = blocks.reach([state.held for state in before]) * size
            reset = blocks.reach([state.held | state.reset for state in before]) * size
            reset = reset if reset > live else 0
            kept = blocks.reach([state.kept for state in before]) * size
        there = [other._reach(one) for other in self.others]
        one.held = max((live for live, _ in there), default=0)
        replica = max((known for _, known in there), default=0)
        one.kept = max(replica, self._reach(one)[1]) if there else 0
        sure = max(sure, elsewhere, known.seen)
        tail, untold = stored + size - 1, known.untold
        if self.account.complete:
            if known.whole and stored <= max(sure, untold):
                tail = min(untold, tail) if untold > sure else 0
            untold = 0
        one.edges = Edges(
            size,
            seen,
            reset,
            kept,
            max(elsewhere, stored_there),
            max(salted, stored_salted, known.salted),
            tail,
            untold,
            known.again,
            known.whole or self.account.complete,
            replica,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What one server published, and the requests that it served.

    `restarts`: when its lives ended, where no event tells.
    """

    received: Iterable[Received]
    asked: Iterable[Logged]
    account: Account | None
    size: int = 1
    restarts: Iterable[float] = ()
    whole: bool = True


def join(
    received: Iterable[Received],
    asked: Iterable[Logged],
    account: Account | None,
    *,
    size: int = 1,
    restarts: Iterable[float] = (),
    whole: bool = True,
) -> list[Answered]:
    """Judge a whole log (see `Requests`); return the requests in the order in which they ended."""
    return join_fleet([Served(received, asked, account, size, restarts, whole)])[0]


def join_fleet(servers: Sequence[Served]) -> list[list[Answered]]:
    """Judge the log of each server, in order of time over all of them."""
    judges = [Requests(one.account, one.size, whole=one.whole) for one in servers]
    moments: list[tuple[float, int, int, int | Received | None]] = []
    rows = [sorted(one.asked, key=lambda row: row.t0 or 0.0) for one in servers]
    for place, one in enumerate(servers):
        judges[place].others = [other for other in judges if other is not judges[place]]
        moments += [(at, -1, place, None) for at in one.restarts]
        for number, row in enumerate(rows[place]):
            begun, first, ended = row.t0 or 0.0, row.cached_at or 0.0, row.t1 or 0.0
            last = 3 if one.account is not None or ended <= begun else -1
            moments += [(begun, 0, place, number), (ended, last, place, number)]
            moments += [(first, 1, place, number)] if first < ended else []
        moments += [(got.batch.ts, 2, place, got) for got in one.received]
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
