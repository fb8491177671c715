"""Whether windows that stock would not keep are evicted by age like all blocks, or before them: what has hit more.

Two kinds have an account each: windows near a prompt's end (NEAR), and windows at an output's end (OUTPUT). By age
they push out ordinary blocks; first, they are gone before a later prompt can resume at them. Whichever order is in
force, what the other one would have hit follows from ages alone: an age within the reach of a pool without them, and
not with them, is a block that they cost.
"""

from __future__ import annotations

SWITCH = 0.005
"""Balance at which the order changes, as a share of the pool."""
MOST = 2.0
"""The most that an account holds, in multiples of that."""


class Account:
    """Blocks hit by one kind of windows being evicted by age, less those hit by their being evicted first."""

    def __init__(self, blocks: int) -> None:
        self.switch = SWITCH * blocks
        self.balance = 0.0
        self.by_age = False
        self.turns = 0

    def add(self, blocks: float) -> None:
        most = MOST * self.switch
        self.balance = max(-most, min(most, self.balance + blocks))
        wants = self.balance >= -self.switch if self.by_age else self.balance > self.switch
        if wants != self.by_age:
            self.by_age = wants
            self.turns += 1
