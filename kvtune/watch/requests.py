"""Joins a log with KV events: each request's hit, and the cause of every missed token. Pure.

A stretch (blocks stored in one step) belongs to the running request with the same session id and tokens. Where events
or the log have no session ids, tokens alone tell. That request's hit ends where
its first stretch begins. A request without a stretch hit all its whole blocks. Of requests with the same whole blocks
the log's counts tell which one computed them. The tokens after a hit are divided by
cause, as in `kvtune/analysis/cache.py`:

    0 .. hit ..|.. reset ..|.. evicted ..|.. not retained ..|.. last token ..|.. partial block ..|.. never seen .. end
               h         reset       kept               usable           full                 seen

`reset`: held, or held until the cache was reset. `kept`: ever held. `seen`: computed before by the same data-parallel
rank since its start. `full`: the whole blocks of `seen`; `usable`: without the block of the last token. Whole blocks
after `seen` that another rank has computed are `other_engine`; those computed under another cache salt `other_salt`.

Where the log has the server's own count of a hit, that is the request's hit, and kvtune's is its `estimate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter

from kvtune.causes import OF_EVENTS, OF_LOG, split
from kvtune.watch.account import Account
from kvtune.watch.blocks import NEVER, NO_SPACE, Blocks, Space, Stretch, seen_of
from kvtune.watch.events import Received
from kvtune.workload.token_ids import Prefixes, packed

SLACK_S = 0.5
"""Largest difference in seconds between the client's and the server's times for a match. The tokens must agree, too."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a log, sent at `t0` and answered at `t1` (time.time()).

    `hit`: tokens that the server reported as cached; -1 if the server did not report them. `session`: the session id
    that the server saw; "" if it is not known.
    """

    name: str
    prompt: Sequence[int]
    answer: Sequence[int]
    t0: float
    t1: float
    hit: int = -1
    salt: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request, its hit, and its missed tokens by cause. `like`: the earlier request with the longest common prefix.

    `agrees`: tokens of that prefix. `estimate`: the hit according to kvtune; -1 if it has none of its own.
    """

    asked: Asked
    hit: int
    causes: dict[str, int]
    agrees: int
    like: str
    estimate: int = -1

    @property
    def exact(self) -> bool:
        """Whether kvtune's account and the server's own count of the hit are the same."""
        return self.asked.hit >= 0 and self.estimate == self.asked.hit


@dataclass(slots=True)
class _Open:
    asked: Asked
    prompt: bytes
    hit: int = -1
    done: int = 0
    rank: int = 0
    edges: list[int] = field(default_factory=list)
    """Where each cause of OF_EVENTS but the last ends, in tokens, if nothing hits."""
    agrees: int = 0
    like: str = ""


class Requests:
    """Joins requests with event batches. In order of time, call `open`, `add` and `close`.

    `open`: a request is sent; `add`: a batch comes; `close`: a request has ended.
    """

    def __init__(self, account: Account) -> None:
        self.account = account
        self.answered: list[Answered] = []
        self._open: list[_Open] = []
        self._texts: dict[tuple[int, str], Prefixes[str]] = {}
        """By rank and cache salt, the prompts that it has computed."""
        self._computed: list[tuple[_Open, bytes]] = []
        """Prompts that were completed in this step: lookups of the next step find them."""
        self._size = 0
        self._by_session = False
        """Whether a session id of the log was one of the events': a log may have other ids."""

    def open(self, asked: Asked) -> None:
        self._find()
        self._open.append(_Open(asked, packed(asked.prompt)))

    def add(self, received: Received) -> None:
        self._find()
        if received.fresh:
            for key in [key for key in self._texts if key[0] == received.rank]:
                del self._texts[key]
        for stretch, blocks in self.account.stretches(received):
            self._owner(stretch, blocks)
            self.account.take(stretch, blocks)

    def _find(self) -> None:
        """Let later lookups find the prompts that were computed so far."""
        for one, tokens in self._computed:
            key = (one.rank, one.asked.salt)
            self._texts.setdefault(key, Prefixes()).add(tokens, one.asked.name)
        self._computed.clear()

    def drop(self, asked: Asked) -> None:
        """Forget a request that was opened: nothing was computed for it."""
        self._open = [one for one in self._open if one.asked is not asked]

    def close(self, asked: Asked, ended: Asked | None = None) -> None:
        """A request has ended. `ended`: the same request with what is known of it now."""
        one = next((o for o in self._open if o.asked is asked), None)
        if one is None:
            return
        self._open.remove(one)
        one.asked = asked = ended or asked
        size = self._size
        if one.hit < 0:
            whole = len(asked.prompt) // size * size if size else 0
            self._judge(one, whole, *self._held_by(one))
            self._computed.append((one, one.prompt))
        self._computed.append((one, packed([*asked.prompt, *asked.answer[:-1]])))
        hit = one.hit if asked.hit < 0 else asked.hit
        causes = _causes(hit, OF_EVENTS, [*one.edges, len(asked.prompt)])
        self.answered.append(Answered(asked, hit, causes, one.agrees, one.like, one.hit))

    def _held_by(self, one: _Open) -> tuple[Blocks | None, Space]:
        """Return the blocks and the space that hold the longest part of this prompt; None if there is no rank."""
        size = max(1, self._size)
        found = [
            (blocks.live(blocks.find(one.prompt, size, space)), blocks, space)
            for blocks in self.account.blocks.values()
            for space in blocks.spaces(one.asked.salt)
        ]
        best = max(found, key=itemgetter(0), default=None)
        return (None, NO_SPACE) if best is None else best[1:]

    def _owner(self, stretch: Stretch, blocks: Blocks) -> None:
        self._size = size = stretch.block_size
        before = blocks.chain(stretch.parent)
        start = 4 * size * len(before)
        prefix = b"".join(blocks.known[name].tokens for name in before)
        tokens = b"".join(stretch.tokens)
        best: _Open | None = None
        better = (False, False)
        named = [one for one in self._open if stretch.session and one.asked.session == stretch.session]
        self._by_session = self._by_session or bool(named)
        for one in named or self._open:
            if not named and self._by_session and stretch.session and one.asked.session:
                continue  # it is another session's
            early, late = one.asked.t0 > stretch.at + SLACK_S, one.asked.t1 < stretch.at - SLACK_S
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
        if best.hit < 0:
            self._judge(best, start // 4, blocks, stretch.space, stretch.step)
        best.done = (start + len(tokens)) // 4
        if best.done >= len(best.prompt) // 4 // size * size:
            self._computed.append((best, best.prompt))

    def _judge(self, one: _Open, hit: int, blocks: Blocks | None, space: Space, step: int = NEVER) -> None:
        size, length = max(1, self._size), len(one.prompt) // 4
        one.hit = hit
        one.rank = blocks.rank if blocks is not None else 0
        found = {key: texts.longest(one.prompt) for key, texts in self._texts.items()}
        same = {rank: reach for (rank, salt), reach in found.items() if salt == one.asked.salt}
        one.agrees, like = max(same.values(), key=itemgetter(0), default=(0, None))
        one.like = like or ""
        seen = same.get(one.rank, (0, None))[0]
        states = blocks.states(blocks.find(one.prompt, size, space)) if blocks is not None else []
        seen = max(seen, size * seen_of(states, step))
        one.agrees = max(one.agrees, seen)
        elsewhere = max((tokens for rank, (tokens, _) in same.items() if rank != one.rank), default=0)
        salted = max(
            (tokens for (_, salt), (tokens, _) in found.items() if salt != one.asked.salt), default=0
        )
        full = seen // size * size
        usable = min(full, (length - 1) // size * size)
        kept = reset = 0
        if blocks is not None:
            before = states[: usable // size]
            live = blocks.reach([state.held for state in before]) * size
            reset = blocks.reach([state.held | state.reset for state in before]) * size
            reset = reset if reset > live else 0
            kept = blocks.reach([state.kept for state in before]) * size
        one.edges = [min(reset, usable), min(kept, usable), usable, full, seen]
        one.edges += [elsewhere // size * size, salted // size * size]


def _causes(hit: int, names: Sequence[str], edges: Sequence[int]) -> dict[str, int]:
    """Divide the tokens after a hit by cause; an edge before the one to its left leaves its cause nothing."""
    *upto, length = accumulate(edges, max)
    counts = split(length, hit, zip(names, upto, strict=False), names[-1])
    return {cause: count for cause, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Seen:
    """Of a prompt, when it was sent: tokens that an earlier one, `like`, has computed; and under another salt.

    `life`: how often the server had been restarted.
    """

    agrees: int
    like: str
    salted: int
    life: int


class ByLog:
    """Divides misses by cause, without events. `size`: tokens of a block.

    Call `open` when a request is sent, and `close` when it has ended, in order of time. Tokens that an earlier request
    computed and the server did not hit are `not_cached`: only events tell why.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._texts: dict[str, Prefixes[str]] = {}
        self._life = 0

    def anew(self) -> None:
        """Begin with an empty cache: the server was restarted."""
        self._texts.clear()
        self._life += 1

    def open(self, asked: Asked) -> Seen:
        prompt, salt = packed(asked.prompt), asked.salt
        seen, like = self._texts[salt].longest(prompt) if salt in self._texts else (0, None)
        others = (tree.longest(prompt)[0] for other, tree in self._texts.items() if other != salt)
        return Seen(seen, like or "", max(others, default=0), self._life)

    def close(self, asked: Asked, seen: Seen) -> Answered:
        length, size = len(asked.prompt), self.size
        full, salted = seen.agrees // size * size, seen.salted // size * size
        usable = min(full, (length - 1) // size * size)
        if seen.life == self._life:
            own = self._texts.setdefault(asked.salt, Prefixes())
            own.add(packed([*asked.prompt, *asked.answer[:-1]]), asked.name)
        causes = _causes(asked.hit, OF_LOG, (usable, full, seen.agrees, salted, length))
        return Answered(asked, asked.hit, causes, seen.agrees, seen.like)


def without_events(asked: Iterable[Asked], size: int, restarts: Sequence[float] = ()) -> list[Answered]:
    """Divide by cause the misses of requests whose hits the server reported (see `ByLog`).

    Return the requests in the order in which they were sent. A request whose hit is not known is left out, its prompt
    is not. `restarts`: when the server's lives ended.
    """
    by_log = ByLog(size)
    answered: list[Answered | None] = []
    running: list[tuple[int, Asked, Seen]] = []
    starts = deque(sorted(restarts))
    for one in [*sorted(asked, key=lambda one: one.t0), None]:
        while one is not None and starts and starts[0] < one.t0:
            starts.popleft()
            by_log.anew()
        for ended in [other for other in running if one is None or other[1].t1 <= one.t0]:
            running.remove(ended)
            at, earlier, seen = ended
            answered[at] = by_log.close(earlier, seen)
        if one is not None:
            running.append((len(answered), one, by_log.open(one)))
            answered.append(None)
    return [one for one in answered if one is not None and one.hit >= 0]


def join(received: Iterable[Received], asked: Iterable[Asked], account: Account) -> list[Answered]:
    """Join a whole recording; return the answered requests in the order in which they ended."""
    requests = Requests(account)
    moments = [(one.t0, 0, one) for one in asked]
    moments += [(one.t1, 2, one) for _, _, one in moments]
    batches = [(got.batch.ts, 1, got) for got in received]
    for _, kind, what in sorted([*moments, *batches], key=lambda moment: moment[:2]):
        if kind == 0:
            requests.open(what)  # type: ignore[arg-type]
        elif kind == 1:
            requests.add(what)  # type: ignore[arg-type]
        else:
            requests.close(what)  # type: ignore[arg-type]
    return requests.answered
