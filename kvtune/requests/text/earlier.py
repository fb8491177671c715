"""The earlier prompts of a server, by cache salt: what of a prompt one of them had. Pure.

Prompts in order of time: `sent`; `cached`, once it is computed; `ended`, with its answer. Between these moments nobody
tells whether a lookup finds its tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtune.data.tally import Edges
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.token_ids import Prefixes, agreeing, packed
from kvtune.requests.text.divergence import Divergence, Divergences

MOST_ANSWER = 1 << 24
"""Tokens of an answer of which not even the number is known."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the earlier prompts tell of one when it was sent. `shared`: first tokens that one of its salt has.

    `like`: the cached prompt with its longest prefix; -1: none. `differs`: the one from which it diverges. `edges`:
    without a unit.
    """

    shared: int
    like: int
    differs: Divergence | None
    edges: Edges


class Earlier:
    """`whole`: whether each prompt that the server has computed is told here."""

    def __init__(self, *, whole: bool = True, bytes_: bool = False) -> None:
        self._bytes = bytes_
        self.anew(whole=whole)

    def anew(self, *, whole: bool = True) -> None:
        """Begin with no prompt: the server was restarted, or (not `whole`) they are forgotten."""
        self.whole, self.tokens = whole, 0
        self._salts: dict[str, Divergences] = {}
        self._open: dict[int, tuple[str, bytes]] = {}
        self._left: Prefixes[int] = Prefixes()
        """Prompts that ended before an answer came: nobody tells what of them was computed."""

    def sent(self, number: int, prompt: Sequence[int], salt: str) -> Known:
        if (own := self._salts.get(salt)) is None:
            own = self._salts[salt] = Divergences(bytes_=self._bytes)
        tokens = packed(prompt)
        others = [cached for name, cached in self._salts.items() if name != salt]
        salted = max((cached.cached.longest(tokens)[0] for cached in others), default=0)
        like = own.cached.longest(tokens)[1]
        seen, differs = own.add(prompt, number=number, cached=False)
        under_way = [(agreeing(other, tokens), whose == salt) for whose, other in self._open.values()]
        perhaps = [salt.cached.reach(tokens) for salt in (own, *others)]
        untold = max(seen, self._left.longest(tokens)[0], *perhaps, *(count for count, _ in under_way))
        self._open[number] = salt, tokens
        self.tokens += len(prompt)
        again = differs.again if differs is not None else ()
        whole = self.whole and all(salt.whole for salt in self._salts.values())
        shared = max([seen, *(count for count, same in under_way if same)])
        return Known(
            shared,
            -1 if like is None else like,
            differs,
            Edges(1, seen, salted=salted, untold=untold, again=again, whole=whole),
        )

    def cached(self, number: int) -> None:
        """The prompt is computed: its first token is out."""
        if (prompt := self._open.get(number)) is not None:
            self._salts[prompt[0]].show(number)

    def ended(self, number: int, answer: Sequence[int], output_tokens: int = -1) -> None:
        """`output_tokens`: of the answer, -1: not known; its last token is not computed."""
        if (opened := self._open.pop(number, None)) is None:
            return
        salt, prompt = opened
        self._salts[salt].show(number, answer)
        self.tokens += len(answer)
        if not answer and output_tokens not in (0, 1):
            untold = output_tokens - 1 if output_tokens > 0 else MOST_ANSWER
            self._salts[salt].cached.leave_open(prompt, untold)

    def dropped(self, number: int, *, computed: bool) -> None:
        """It has no answer. `computed`: its prompt may have been computed, or a part of it."""
        if (prompt := self._open.pop(number, None)) is not None and computed:
            self._left.add(prompt[1], number)

    def beside(self, number: int, like: int, salt: str) -> Divergence | None:
        """Return how a prompt that was sent differs from this earlier one of its salt."""
        return self._salts[salt].beside(number, like) if salt in self._salts else None


def in_order(rows: Iterable[Logged], earlier: Earlier) -> Iterator[Known]:
    """Yield what earlier prompts tell of each request of a log, whose order decides where it has no times."""
    waiting: list[tuple[float, int, bool, Logged]] = []
    for number, row in enumerate(rows):
        while waiting and (row.t0 is None or waiting[0][0] <= row.t0):
            _, other, whole, owner = heapq.heappop(waiting)
            if whole:
                earlier.ended(other, owner.answer, owner.output_tokens)
            else:
                earlier.cached(other)
        yield earlier.sent(number, row.prompt, row.salt)
        if row.cached_at is None:
            earlier.ended(number, row.answer, row.output_tokens)
            continue
        whole = row.t1 is None or row.t1 <= row.cached_at
        heapq.heappush(waiting, (row.cached_at, number, whole, row))
        if not whole and row.t1 is not None:
            heapq.heappush(waiting, (row.t1, number, True, row))
