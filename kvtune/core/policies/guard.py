"""Whether to leave the order of age, and how far: what that would have won is weighed first, and what it did win after.

In age's order, `promised` adds up what a pool would have hit that keeps reused blocks twice as long as age does and as
many fewer single ones, less what it would have missed; beyond `EVIDENCE` that is tried. From there on each block that
was hit though age would have lost it is paid into an account, each that age would have kept is taken out, and
`TOLERATED` of all blocks asked for is its income. Below zero it is age's turn again, and new evidence is wanted.

A promise is no winning: a load can change as soon as the pool trusts it, and the prompts of a first lap look like any
that never come back. So blocks used once may go before their turn only as far as a `stake` reaches: what was won so
far, less what was lost, and a share of all blocks asked for. That share is what the order can cost. It is `LENT`; a
long history lends more, up to 1 / `TRUSTED_AFTER`, so that the stake is the whole pool after as many pools.
Amounts but `TOLERATED`, `LENT` and `FEWEST` are shares of the pool.
"""

from __future__ import annotations

EVIDENCE, START, MOST = 0.1, 0.02, 0.1
FEWEST = 1000
"""Blocks of evidence, or the whole of a smaller pool: fewer are a few prompts, which say little."""
TOLERATED = 0.002
LENT, TRUSTED_AFTER = 0.005, 70
"""A share of the blocks asked for; pools of them."""


class Guard:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.wanted = min(blocks, max(FEWEST, EVIDENCE * blocks))
        self.promised = 0.0
        self.balance = 0.0
        self.by_age = True
        self.turns = 0
        self.asked = 0
        self.won = 0
        """Blocks hit that age would have lost, less those lost that age would have kept; at most a pool."""
        self.stake = 0.0
        """Blocks used once that may go before their turn, of those that age would still have."""

    def settle(self, won: int, lost: int, asked: int, promised: int) -> None:
        """Book what happened since the last call: in one epoch."""
        self.asked += asked
        if not self.by_age:
            self.won = min(self.blocks, self.won + won - lost)
        share = max(LENT, min(self.asked / self.blocks, TRUSTED_AFTER) / TRUSTED_AFTER**2)
        self.stake = max(0.0, min(float(self.blocks), share * self.asked + self.won))
        if self.by_age:
            self.promised = max(0.0, self.promised + promised)
            if self.promised > self.wanted:
                self.by_age, self.balance = False, START * self.blocks
                self.turns += 1
            return
        self.balance = min(MOST * self.blocks, self.balance + won - lost + TOLERATED * asked)
        if self.balance < 0:
            self.by_age, self.promised = True, 0.0
