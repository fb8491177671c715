"""Whether the tier admits by reuse or keeps everything by age, as vLLM's LRU does: what would have hit more.

It starts by age. There, each chunk that is asked for again after its eviction speaks for reuse, and each hit on a chunk
that reuse would not have stored speaks against it; beyond `WANTED` reuse is tried. From there on an LRU list of the
tier's size, of keys only, tells which hits age would have had. Those that the tier missed are paid from an account.
Below zero it is age's turn again, and twice the evidence is wanted. Amounts are shares of the tier. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

WANTED, START, MOST = 0.05, 0.02, 0.25
TOLERATED = 0.002
"""Of the chunks asked for: the account's income."""


class Duel:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.by_age = True
        self.turns = 0
        self.wanted = WANTED * capacity
        self.balance = 0.0
        self.promised = 0
        self._lru: OrderedDict[bytes, None] = OrderedDict()

    def asked_again(self, chunks: int, refused_hits: int) -> None:
        """By age: so many evicted chunks were asked for, and so many hits were on chunks that reuse would refuse."""
        if self.by_age:
            self.promised = max(0, self.promised + chunks - refused_hits)
            if self.promised > self.wanted:
                self.by_age, self.balance = False, START * self.capacity
                self.promised = 0
                self.turns += 1

    def settle(self, keys: Sequence[bytes], in_pool: int, loaded: Collection[bytes]) -> None:
        """A request is over that asked for these keys, each once, in its order; the first ones were in the pool."""
        lru = self._lru
        if not self.by_age:
            won = lost = 0
            whole = True
            """Age's LRU has all of the prefix up to here."""
            for key in keys[in_pool:]:
                whole = whole and key in lru
                if key in loaded:
                    won += not whole
                else:
                    lost += whole
            balance = self.balance + won - lost + TOLERATED * len(keys)
            self.balance = min(MOST * self.capacity, balance)
            if self.balance < 0:
                self.by_age = True
                self.wanted *= 2
        for key in [key for key in keys if key in lru]:
            del lru[key]
        lru.update(dict.fromkeys(reversed(keys)))
        for _ in range(len(lru) - self.capacity):
            lru.popitem(last=False)

    def clear(self) -> None:
        self._lru.clear()
        self.promised = 0
