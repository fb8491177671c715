"""Joins a log with KV events: each request's hit, and the cause of every missed token. Pure.

A stretch (blocks stored in one step) belongs to the running request with the same tokens. That request's hit ends where
its first stretch begins. A request without a stretch hit all its whole blocks. The tokens after a hit are divided by
cause, as in `kvtune/analysis/cache.py`:

    0 .. hit ..|.. evicted ..|.. not retained ..|.. last token ..|.. partial block ..|.. never seen .. prompt's end
               h           kept               usable           full                 seen

`kept`: ever held. `seen`: computed before by the same data-parallel rank. `full`: the whole blocks of `seen`; `usable`:
without the block of the last token. Whole blocks after `seen` that another rank has computed are `other_engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from kvtune.watch.account import Account
from kvtune.watch.blocks import Blocks, Stretch
from kvtune.watch.events import Received
from kvtune.workload.token_ids import Prefixes, packed

CAUSES = ("evicted", "not_retained", "last_token", "partial_block", "other_engine", "cold")
SLACK_S = 0.5
"""Largest difference in seconds between the client's and the server's times for a match. The tokens must agree, too."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a log, sent at `t0` and answered at `t1` (time.time()).

    `hit`: tokens that the server reported as cached; -1 if the server did not report them.
    """

    name: str
    prompt: Sequence[int]
    answer: Sequence[int]
    t0: float
    t1: float
    hit: int = -1


@dataclass(frozen=True, slots=True)
class Answered:
    """A request, its hit, and its missed tokens by cause. `like`: the earlier request with the longest common prefix.

    `agrees`: tokens of that prefix.
    """

    asked: Asked
    hit: int
    causes: dict[str, int]
    agrees: int
    like: str


@dataclass(slots=True)
class _Open:
    asked: Asked
    prompt: bytes
    hit: int = -1
    done: int = 0
    rank: int = 0
    causes: dict[str, int] = field(default_factory=dict)
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
        self._texts: dict[int, Prefixes[str]] = {}
        """By rank, the prompts that it has computed."""
        self._computed: list[tuple[int, bytes, str]] = []
        """Prompts that were completed in this step: lookups of the next step find them."""
        self._size = 0

    def open(self, asked: Asked) -> None:
        self._find()
        self._open.append(_Open(asked, packed(asked.prompt)))

    def add(self, received: Received) -> None:
        self._find()
        for stretch, blocks in self.account.stretches(received):
            self._owner(stretch, blocks)
            self.account.judge(stretch, blocks)

    def _find(self) -> None:
        """Let later lookups find the prompts that were computed so far."""
        for rank, tokens, name in self._computed:
            self._texts.setdefault(rank, Prefixes()).add(tokens, name)
        self._computed.clear()

    def close(self, asked: Asked) -> None:
        one = next((o for o in self._open if o.asked is asked), None)
        if one is None:
            return
        self._open.remove(one)
        size = self._size
        if one.hit < 0:
            whole = len(asked.prompt) // size * size if size else 0
            self._judge(one, whole, self._held_by(one.prompt))
            self._computed.append((one.rank, one.prompt, asked.name))
        computed = [*asked.prompt, *asked.answer[:-1]]
        self._computed.append((one.rank, packed(computed), asked.name))
        self.answered.append(Answered(asked, one.hit, one.causes, one.agrees, one.like))

    def _held_by(self, prompt: bytes) -> Blocks | None:
        """Return the blocks of the rank that holds the longest part of this prompt; None if there is no rank."""
        ranks = self.account.blocks.values()
        size = max(1, self._size)
        return max(ranks, key=lambda blocks: blocks.live(blocks.find(prompt, size)), default=None)

    def _owner(self, stretch: Stretch, blocks: Blocks) -> None:
        self._size = size = stretch.block_size
        before = blocks.chain(stretch.parent)
        start = 4 * size * len(before)
        prefix = b"".join(blocks.known[name].tokens for name in before)
        tokens = b"".join(stretch.tokens)
        best: _Open | None = None
        for one in self._open:
            if one.asked.t0 > stretch.at + SLACK_S or one.asked.t1 < stretch.at - SLACK_S:
                continue
            piece = one.prompt[start : start + len(tokens)]
            if not piece or not tokens.startswith(piece[: len(piece) // (4 * size) * 4 * size]):
                continue
            if len(piece) < 4 * size or one.prompt[:start] != prefix:
                continue
            if one.hit >= 0 and one.done == start // 4:
                best = one
                break
            if best is None or (best.hit >= 0) > (one.hit >= 0):
                best = one
        if best is None:
            return
        if best.hit < 0:
            self._judge(best, start // 4, blocks, stretch.step)
        best.done = (start + len(tokens)) // 4
        if best.done >= len(best.prompt) // 4 // size * size:
            self._computed.append((best.rank, best.prompt, best.asked.name))

    def _judge(self, one: _Open, hit: int, blocks: Blocks | None, step: int = 1 << 62) -> None:
        size, length = max(1, self._size), len(one.prompt) // 4
        one.rank = blocks.rank if blocks is not None else 0
        found = {rank: texts.longest(one.prompt) for rank, texts in self._texts.items()}
        one.agrees, like = max(found.values(), key=itemgetter(0), default=(0, None))
        one.like = like or ""
        seen = found.get(one.rank, (0, None))[0]
        chain = blocks.find(one.prompt, size) if blocks is not None else []
        if blocks is not None:
            seen = max(seen, size * blocks.seen(chain, step))
        one.agrees = max(one.agrees, seen)
        elsewhere = max((tokens for rank, (tokens, _) in found.items() if rank != one.rank), default=0)
        full = seen // size * size
        usable = min(full, (length - 1) // size * size)
        kept = blocks.ever(chain[: usable // size]) * size if blocks is not None else 0
        edges = [max(hit, edge) for edge in (min(kept, usable), usable, full, seen)]
        edges += [max(edges[-1], elsewhere // size * size), length]
        widths = [right - left for left, right in zip([hit, *edges], edges, strict=False)]
        one.hit = hit
        one.causes = {cause: width for cause, width in zip(CAUSES, widths, strict=True) if width}


def without_events(asked: Iterable[Asked], size: int) -> list[Answered]:
    """Divide by cause the misses of requests whose hits the server reported, without events. `size`: tokens of a block.

    Return the requests in the order in which they were sent. Tokens that an earlier request computed and the server did
    not hit are `not_cached`: only events tell why.
    """
    answered: list[Answered] = []
    texts: Prefixes[str] = Prefixes()
    running: list[Asked] = []
    for one in sorted(asked, key=lambda one: one.t0):
        for earlier in [other for other in running if other.t1 <= one.t0]:
            running.remove(earlier)
            texts.add(packed([*earlier.prompt, *earlier.answer[:-1]]), earlier.name)
        running.append(one)
        seen, like = texts.longest(packed(one.prompt))
        full, length = seen // size * size, len(one.prompt)
        usable = min(full, (length - 1) // size * size)
        edges = [max(one.hit, edge) for edge in (usable, full, seen, length)]
        widths = zip(
            ("not_cached", "last_token", "partial_block", "cold"), [one.hit, *edges], edges, strict=False
        )
        causes = {cause: right - left for cause, left, right in widths if right > left}
        answered.append(Answered(one, one.hit, causes, seen, like or ""))
    return answered


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
