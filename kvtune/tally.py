"""Prompt tokens that hit, and that missed by cause: of a prompt, a run, a server. Structs inherit the counts. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec

from kvtune.causes import UNSEEN, UNTOLD

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

    def __add__(self, other: Tally) -> Tally:
        misses = Counter(self.misses) + Counter(other.misses)
        return Tally(self.query_tokens + other.query_tokens, self.hit_tokens + other.hit_tokens, dict(misses))

    def __sub__(self, before: Tally) -> Tally:
        """Return what was counted since `before`."""
        misses = Counter(self.misses) - Counter(before.misses)
        return Tally(
            self.query_tokens - before.query_tokens, self.hit_tokens - before.hit_tokens, dict(misses)
        )

    @property
    def seen(self) -> tuple[float, float] | None:
        """The least and the largest share of the tokens that an earlier prompt can have had; None: nothing tells."""
        if not self.query_tokens:
            return None
        most = self.query_tokens - sum(self.misses.get(cause, 0) for cause in UNSEEN)
        least = most - sum(self.misses.get(cause, 0) for cause in UNTOLD)
        return max(0, least) / self.query_tokens, max(0, most) / self.query_tokens
