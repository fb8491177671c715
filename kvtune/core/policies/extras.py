"""Windows of which the core knows more than their age: what stock would not keep, and where a conversation went on.

Two kinds that stock would not keep have an account each: windows near a prompt's end (NEAR), and windows at an
output's end (OUTPUT). By age they push out ordinary blocks; first, they are gone before a later prompt can resume at
them. Whichever order is in force, what the other one would have hit follows from ages alone: an age within the reach of
a pool without them, and not with them, is a block that they cost.

One block that they push out can cost all of its prompt, and that of others behind it, and what they would have hit is
no hit yet: `promised`. So windows near a prompt's end have `room` for no more blocks than they have won so far, less
what they cost; what was promised adds to it as far as a long history lends (guard.py). Older windows go first. An
output's next turn comes once: by age or not, all of its windows are alike.

A window behind which a conversation went on is `Left`. Stock keeps it by age, but the next turn resumes farther on:
such windows go first once many were evicted without having been asked for. A prompt that is sent again does ask for
its window, and each block that is asked for weighs as much as several that are not. Where that happens an output
is not all that can follow its prompt: outputs' windows have room only for what they won, too.
"""

from __future__ import annotations

SWITCH, FEWEST = 0.005, 50
"""Balance at which the order changes: a share of the pool; in small pools so many blocks, or an eighth of the pool."""
MOST = 2.0
"""The most that an account holds, in multiples of that."""
PROMISED, FORGOTTEN = 0.3, 0.003
"""The most that is promised, as a share of the pool; the share of it that each epoch forgets."""
REGRET = 8
"""What a block weighs that went first and was asked for: a window lost costs a prompt."""
A_PROMISE = 2.0
"""Room for each promised block, as far as the history lends."""


class Scale:
    """Two orders, and the blocks that the second one would be ahead. It is in force while it leads."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.switch = max(SWITCH * blocks, min(FEWEST, blocks / 8))
        self.most = MOST * self.switch
        self.least = -self.most
        self.balance = 0.0
        self.turned = False
        self.turns = 0

    def weigh(self, blocks: float) -> None:
        self.balance = max(self.least, min(self.most, self.balance + blocks))
        wants = self.balance >= -self.switch if self.turned else self.balance > self.switch
        if wants != self.turned:
            self.turned = wants
            self.turns += 1


class Left(Scale):
    """Windows behind which a conversation went on: by age as with stock, or first, while they do not come again."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.least *= REGRET

    @property
    def asked_for(self) -> bool:
        """Prompts are sent again though their conversations went on."""
        return self.balance < -self.switch

    def ended(self) -> None:
        """One was evicted by age, and had not been asked for."""
        self.weigh(1)

    def came_again(self, blocks: int) -> None:
        """A prompt that had been continued was sent again."""
        self.weigh(-REGRET * blocks)

    def missed(self) -> None:
        """One that went first was asked for: that cost its prompt."""
        self.weigh(2 * self.least)


class Account(Scale):
    """Blocks hit by one kind of windows being evicted by age, less those hit by their being evicted first."""

    def __init__(self, blocks: int, limited: bool = True) -> None:
        super().__init__(blocks)
        self.limited = limited
        self.promise = 0.0
        self.winnings = 0.0
        self.lent = 0.0
        """Blocks that may be risked for a promise."""
        self.room = 0
        """So many free blocks of theirs are evicted by age."""
        self.full = False
        """All of them are: their room was not used up at the last look."""
        self.held = 0
        """Blocks in a room that was."""
        self.kept = self.first = 0.0
        """Epochs back to which a pool reaches that evicts all of them by age, or all of them first."""
        self.beyond = False
        self.useless = self.cost = 0

    @property
    def by_age(self) -> bool:
        return self.turned

    def add(self, blocks: float) -> None:
        """Blocks that one order hit, or would have hit, and the other not."""
        self.promise = max(-self.most, min(PROMISED * self.blocks, self.promise + blocks))
        self.weigh(blocks)
        self._limit()

    def earn(self, blocks: float) -> None:
        """Blocks were hit because these windows were there; below 0: blocks were not, that they had pushed out."""
        self.winnings = max(-self.switch, min(self.blocks, self.winnings + blocks))
        self.add(blocks)

    def _limit(self) -> None:
        if not self.by_age:
            self.room = 0
        elif not self.limited:
            self.room = self.blocks
        elif self.promise <= 0:
            self.room = 0
        else:
            room = self.winnings + min(self.lent, A_PROMISE * self.promise)
            self.room = int(max(0.0, min(self.blocks, room)))

    def look(self, size: int) -> None:
        """So many of their blocks are free, in an epoch in which blocks were asked for."""
        if self.promise > 0:
            self.promise *= 1 - FORGOTTEN
        self._limit()
        self.full = self.by_age and size < self.room
        self.held = 0 if self.full else min(size, self.room)

    def hit(self, epoch: float, count: int) -> None:
        """Ordinary blocks were hit, behind those of the same prompt that were hit before."""
        if not self.full and (self.beyond or epoch < self.kept):
            self.beyond = True
            self.add(-count)

    def computed_again(self, epoch: float) -> None:
        """A block was there, but of no use without a window."""
        if not self.full and epoch >= self.kept:
            self.useless += 1

    def missed(self, epoch: float) -> None:
        """A window was asked for that had been evicted."""
        if not self.full and epoch >= self.kept:
            self.add(self.useless)
            self.useless = 0

    def came_back(self, epoch: float) -> None:
        """An ordinary block was asked for that had been evicted."""
        if self.by_age and epoch >= self.first:
            self.cost += 1

    def charge(self) -> None:
        """What came back could have been used."""
        self.earn(-self.cost)
        self.cost = 0
