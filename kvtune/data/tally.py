"""Prompt tokens that hit, and that missed by cause: of a prompt, a run, a server. Structs inherit the counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import msgspec

from kvtune.data.causes import DIVERGED, OTHER_REPLICA, UNSEEN, UNTOLD

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Hits(msgspec.Struct, frozen=True):
    """Prompt tokens that were looked up in a cache, and those that it had."""

    query_tokens: Tokens = 0
    hit_tokens: Tokens = 0

    @property
    def missed(self) -> int:
        return self.query_tokens - self.hit_tokens

    @property
    def rate(self) -> float | None:
        return self.hit_tokens / self.query_tokens if self.query_tokens else None


class Tally(Hits, frozen=True):
    """Hits and `misses` by cause: in all `query_tokens`. No misses though tokens missed: causes are not known."""

    misses: dict[str, Tokens] = {}

    @staticmethod
    def sum(tallies: Iterable[Tally], causes: Iterable[str] = ()) -> Tally:
        """Return all in one. Each of `causes` has a count, be it 0; other causes only if they have tokens."""
        query, hit, misses = 0, 0, dict.fromkeys(causes, 0)
        for tally in tallies:
            query, hit = query + tally.query_tokens, hit + tally.hit_tokens
            for cause, tokens in tally.misses.items():
                if tokens:
                    misses[cause] = misses.get(cause, 0) + tokens
        return Tally(query, hit, misses)

    def __add__(self, other: Tally) -> Tally:
        return Tally.sum((self, other))

    @property
    def seen(self) -> tuple[float, float] | None:
        """The least and the largest share of the tokens that an earlier prompt can have had; None: nothing tells."""
        if not self.query_tokens:
            return None
        most = self.query_tokens - sum(self.misses.get(cause, 0) for cause in UNSEEN)
        least = most - sum(self.misses.get(cause, 0) for cause in UNTOLD)
        return max(0, least) / self.query_tokens, max(0, most) / self.query_tokens


def split(prompt: int, hit: int, edges: Iterable[tuple[str, int]], rest: str = "cold") -> Tally:
    """Cut the tokens after a hit into causes: those up to each edge have its cause, those after the last one `rest`.

        0 ... hit ... edge ... edge ... prompt
         hits    cause    cause     rest

    Every judge of misses finds edges and asks here. An edge below the one before it leaves its cause nothing, and one
    above a later edge ends there: whatever the edges are, no count is negative, and hit and counts are the prompt.
    """
    start = end = min(max(hit, 0), prompt)
    cut: list[tuple[str, int]] = []
    high = prompt
    for cause, edge in reversed([*edges, (rest, prompt)]):
        high = min(max(start, edge), high)
        cut.append((cause, high))
    misses: dict[str, int] = {}
    for cause, high in reversed(cut):
        misses[cause] = misses.get(cause, 0) + high - end
        end = high
    return Tally(prompt, start, misses)


@dataclass(frozen=True, slots=True)
class Edges:
    """Up to which of its tokens each of these holds of a prompt; 0: of none.

        0 .. hit .. reset .. kept .. usable .. full .. seen .. tail .. elsewhere .. replica .. salted .. untold ... end
             reset  evicted  not retained  last   partial   no     other       other      other     unknown  diverged,
                             or not cached token  block    event   engine      replica    salt               cold

    `unit`: hits are multiples of it. `seen`: an earlier prompt of the same cache has the tokens; `full`: its whole
    units; `usable`: without the unit of the last token. `reset`: held until the cache was reset; `kept`: ever held, or
    None if no event tells. `elsewhere`, `replica`, `salted`: another rank, another server, a prompt of another salt has
    them. `tail`, `untold`: an earlier prompt may have them, but events tell whole blocks only, or nobody tells.
    `again`: the pieces (first token, end) that an earlier prompt has after a difference. `whole`: whether each prompt
    that was computed is known.
    """

    unit: int
    seen: int = 0
    reset: int = 0
    kept: int | None = None
    elsewhere: int = 0
    salted: int = 0
    tail: int = 0
    untold: int = 0
    again: tuple[tuple[int, int], ...] = ()
    whole: bool = True
    replica: int = 0

    def tally(self, prompt: int, hit: int) -> Tally:
        """Return the tokens of a prompt with this hit. An edge before the one to its left leaves its cause nothing."""
        unit = self.unit
        full = self.seen // unit * unit
        usable = min(full, max(prompt - 1, 0) // unit * unit)
        lost, kept = ("not_cached", 0) if self.kept is None else ("not_retained", self.kept)
        # Where another prompt may have had whole units, nobody knows whether they are missing or only begun.
        sure = self.whole and max(self.tail, self.untold) // unit * unit <= full
        edges = [
            ("reset", min(self.reset, usable)),
            ("evicted", min(kept, usable)),
            (lost, usable),
            ("last_token", full),
            ("partial_block" if sure else "unknown", self.seen),
            *self.unseen(hit),
        ]
        upto = (min(end, prompt) for end in accumulate((edge for _, edge in edges), max))
        rising = [(cause, edge) for (cause, _), edge in zip(edges, upto, strict=True)]
        return Tally.sum([split(prompt, hit, rising, "cold" if self.whole else "unknown")])

    def unseen(self, hit: int) -> list[tuple[str, int]]:
        """Return the edges of causes after the tokens that an earlier prompt of the same cache has."""
        if not self.whole:
            return []  # a prompt that is not known may have had all of them
        unit = self.unit
        edges = [("tails", self.tail), ("other_engine", self.elsewhere // unit * unit)]
        edges += [(OTHER_REPLICA, self.replica // unit * unit)]
        edges += [("other_salt", self.salted), ("unknown", self.untold)]
        after = max(hit, self.seen, *(edge for _, edge in edges))
        again = sum(max(0, end - max(start, after)) for start, end in self.again)
        edges.append((DIVERGED, after + again if again else 0))
        return [(cause, edge) for cause, edge in edges if edge]
