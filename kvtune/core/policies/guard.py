"""Whether to leave the order of age, and how far: what that would have won is weighed first, and what it did win after.

In age's order, `promised` adds up what a pool would have hit that keeps reused blocks twice as long as age does and as
many fewer single ones, less what it would have missed; beyond `EVIDENCE` that is tried. From there on each block that
was hit though age would have lost it is paid into an account, each that age would have kept is taken out, and
`TOLERATED` of all blocks asked for is its income. Below zero it is age's turn again, and new evidence is wanted.

A promise is no winning: a load can change as soon as the pool trusts it, and the prompts of a first lap look like any
that never come back. So blocks used once may go before their turn only as far as a `stake` reaches: what was won so
far, less what was lost, and a share of all blocks asked for. That share is what the order can cost. It is `LENT`; a
long history lends more, up to 1 / `TRUSTED_AFTER`, so that the stake is the whole pool after as many pools.

With sliding windows a block lost can cost all of its prompt: behind it no window is of use, and before it there is
none. There a history must be longer, a small pool's is that of a pool of `SMALL` blocks, and a stake below `LEAST` of
the pool is none: it could cost a prompt, and keep none. Windows near a prompt's end are lent as much (extras.py).
Blocks computed again though they were there count as lost with the one that made them useless.
Amounts but `TOLERATED`, `LENT`, `FEWEST` and `SMALL` are shares of the pool.
"""

from __future__ import annotations

EVIDENCE, START, MOST = 0.1, 0.02, 0.1
FEWEST = 1000
"""Blocks of evidence, or the whole of a smaller pool: fewer are a few prompts, which say little."""
TOLERATED = 0.002
LENT = 0.005
"""Share of the blocks asked for, without windows."""
TRUSTED_AFTER, TRUSTED_AFTER_WITH_WINDOWS, SMALL = 70, 80, 4000
"""Pools of blocks asked for; blocks of a pool."""
LEAST = 0.01
"""Share of the pool."""


class Guard:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.wanted = min(blocks, max(FEWEST, EVIDENCE * blocks))
        self.promise = 0.0
        self.balance = 0.0
        self.by_age = True
        self.turns = 0
        self.history = 0
        """Blocks asked for, in all."""
        self.winnings = 0
        """Blocks hit that age would have lost, less those lost that age would have kept; at most a pool."""
        self.lent = 0.0
        """Blocks that the history is worth."""
        self.stake = 0.0
        """Blocks used once that may go before their turn, of those that age would still have."""
        self.won = self.lost = self.asked = self.promised = 0
        """Since the last `settle`."""
        self.losing = False
        """The prompt whose blocks are stored has lost one that age would have kept."""
        self.redone = 0
        """Blocks of that prompt which were there, as age would have had them, and were computed again."""
        self.with_windows = False

    def lost_or_not(self, kept_by_age: bool) -> None:
        """A block was computed again that had been evicted."""
        if kept_by_age:
            self.lost += 1 + self.redone
            self.losing = True
        self.redone = 0

    def computed_again(self, anyway: bool) -> None:
        """A block was there, as age would have had it, but of no use."""
        if self.losing:
            self.lost += 1
        elif self.with_windows and not anyway:
            self.redone += 1

    def new_or_hit(self) -> None:
        """Blocks that were never seen, or were hit: what was computed before them is another matter."""
        self.losing, self.redone = False, 0

    def settle(self) -> None:
        """Book what happened since the last call: in one epoch."""
        won = self.won - self.lost
        self.history += self.asked
        if not self.by_age:
            self.winnings = min(self.blocks, self.winnings + won)
        self.lent = self._lent()
        self.stake = max(0.0, min(float(self.blocks), self.lent + self.winnings))
        if self.with_windows and self.stake < LEAST * self.blocks:
            self.stake = 0.0
        if self.by_age:
            self.promise = max(0.0, self.promise + self.promised)
            if self.promise > self.wanted:
                self.by_age, self.balance = False, START * self.blocks
                self.turns += 1
        else:
            self.balance = min(MOST * self.blocks, self.balance + won + TOLERATED * self.asked)
            if self.balance < 0:
                self.by_age, self.promise = True, 0.0
        self.won = self.lost = self.asked = self.promised = 0

    def _lent(self) -> float:
        if self.with_windows:
            trust = min(self.history / max(self.blocks, SMALL) / TRUSTED_AFTER_WITH_WINDOWS, 1.0)
            lent = trust**2 / TRUSTED_AFTER_WITH_WINDOWS * self.history
            return lent if lent >= LEAST * self.blocks else 0.0
        trust = min(self.history / self.blocks / TRUSTED_AFTER, 1.0)
        return max(LENT, trust / TRUSTED_AFTER) * self.history
