"""Whether to leave the order of age, and how far: what that would have won is weighed first, and what it did win after.

In age's order, `promised` adds up what a pool would have hit that keeps reused blocks twice as long as age does and as
many fewer single ones, less what it would have missed; beyond `EVIDENCE` that is tried. From there on each block that
was hit though age would have lost it is paid into an account, each that age would have kept is taken out, and
`TOLERATED` of all blocks asked for is its income. Below zero it is age's turn again, and new evidence is wanted.

A promise is no winning: a load can change as soon as the pool trusts it. So at first only `LOAN` of the pool may be
filled with reused blocks in the place of younger single ones. This `stake` grows by what was won and, while more was
won than lost, by itself: it doubles in `DOUBLED_IN` epochs. So a turn costs at most what its account had, and of what
its stake replaced before its end, what is asked for after. Amounts but `TOLERATED` and `FEWEST` are shares of the pool.
"""

from __future__ import annotations

EVIDENCE, START, MOST, LOAN = 0.1, 0.02, 0.1, 0.1
FEWEST = 1000
"""Blocks of evidence, or the whole of a smaller pool: fewer are a few prompts, which say little."""
TOLERATED = 0.002
DOUBLED_IN = 8


class Guard:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.wanted = min(blocks, max(FEWEST, EVIDENCE * blocks))
        self.promised = 0.0
        self.balance = 0.0
        self.by_age = True
        self.turns = 0
        self.won = 0
        """Of this turn, less what it lost."""
        self.stake = 0.0
        """Blocks used once that may go before their turn, of those that age would still have."""

    def settle(self, won: int, lost: int, asked: int, promised: int) -> None:
        """Book what happened since the last call: in one epoch."""
        if self.by_age:
            self.promised = max(0.0, self.promised + promised)
            if self.promised > self.wanted:
                self.by_age, self.balance = False, START * self.blocks
                self.won, self.stake = 0, LOAN * self.blocks
                self.turns += 1
            return
        self.won += won - lost
        if self.won > 0 and won >= lost:
            self.stake *= 2 ** (1 / DOUBLED_IN)
        self.stake = min(float(self.blocks), max(LOAN * self.blocks, self.stake + won - lost))
        self.balance = min(MOST * self.blocks, self.balance + won - lost + TOLERATED * asked)
        if self.balance < 0:
            self.by_age, self.promised = True, 0.0
