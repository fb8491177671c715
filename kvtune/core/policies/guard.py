"""Whether to leave the order of age: an account of hits against those that a pool would have had that evicts by age.

Each block that was hit though least recently used would have lost it is paid in, each that it would have kept is
taken out, with `TOLERATED` of all blocks asked for as income. Below zero the policy evicts by age until the account
has `RESUMED` again. So over any stretch of time at most `MOST` of the pool and `TOLERATED` of the blocks asked for are
lost, and besides, once each time that the account runs empty, what was evicted before and is asked for only after.
Amounts but the last are shares of the pool.
"""

from __future__ import annotations

START, MOST, RESUMED = 0.02, 0.1, 0.02
TOLERATED = 0.002


class Guard:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.balance = START * blocks
        self.by_age = False
        self.turns = 0

    def settle(self, won: int, lost: int, asked: int) -> None:
        """Book what happened since the last call."""
        self.balance = min(MOST * self.blocks, self.balance + won - lost + TOLERATED * asked)
        if self.by_age != (self.balance < (RESUMED * self.blocks if self.by_age else 0)):
            self.by_age = not self.by_age
            self.turns += 1
