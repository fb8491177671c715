"""Windows of which the core knows more than their age: what stock would not keep, and where a conversation went on.

Two kinds that stock would not keep have an account each: windows near a prompt's end (`Near`), and windows at an
output's end (`Outputs`). By age they push out ordinary blocks; first, they are gone before a later prompt can resume at
them. Whichever order is in force, what the other one would have hit follows from ages alone: an age within the reach of
a pool without them, and not with them, is a block that they cost.

One block that they push out can cost all of its prompt, and that of others behind it, and what they would have hit is
no hit yet: `promised`. So windows near a prompt's end have `room` for no more blocks than they have won so far, less
what they cost; what was promised adds to it as far as a long history lends (guard.py). Older windows go first.

A window behind which a conversation went on is `Left`. Stock keeps it by age, but the next turn resumes farther on:
such windows go first once many were evicted without having been asked for. A prompt that is sent again does ask for
its window, and each block that is asked for weighs as much as several that are not.

From then on outputs' windows have room for as many blocks as windows that were left gave back: those that went first
though stock would still have them. So both together take no more of the pool than stock takes, but for outputs' windows
that were there at that moment. Beyond that the newest goes first: the others are next to be asked for. Until then
nobody knows whether next turns come, and all are alike.
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

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
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
        self.weigh(blocks)
        self._limit()

    def earn(self, blocks: float) -> None:
        """Blocks were hit because these windows were there; below 0: blocks were not, that they had pushed out."""
        self.add(blocks)

    def _limit(self) -> None:
        self.room = int(max(0.0, min(self.blocks, self._allowed()))) if self.by_age else 0

    def _allowed(self) -> float:
        """The room, in blocks, while they are evicted by age at all."""
        return self.blocks

    def look(self, size: int) -> None:
        """So many of their blocks are free, in an epoch in which blocks were asked for."""
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


class Near(Account):
    """Room for what was won, and for a promise as far as a history lends."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.promise = 0.0
        self.winnings = 0.0
        self.lent = 0.0
        """Blocks that may be risked for a promise."""

    def add(self, blocks: float) -> None:
        self.promise = max(-self.most, min(PROMISED * self.blocks, self.promise + blocks))
        super().add(blocks)

    def earn(self, blocks: float) -> None:
        self.winnings = max(-self.switch, min(self.blocks, self.winnings + blocks))
        super().earn(blocks)

    def _allowed(self) -> float:
        return self.winnings + min(self.lent, A_PROMISE * self.promise) if self.promise > 0 else 0

    def look(self, size: int) -> None:
        if self.promise > 0:
            self.promise *= 1 - FORGOTTEN
        super().look(size)


class Outputs(Account):
    """Room for all, until it is known whether next turns come; then for what windows that were left gave back."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.known = self.gives_back = False
        """Whether it is known; and whether it is that they do."""
        self.given_back: dict[int, int] = {}
        """Blocks of windows left that went first, by epoch, as long as age would still have them."""
        self.allowed = 0
        """How many they are."""

    def has_room(self, size: int) -> bool:
        """For one more, beside so many."""
        return size < self.room

    def learn(self, left: Left, size: int, epoch: int, reach: float) -> None:
        """What is known of windows left; by age a pool reaches back that far; so many of outputs' are free."""
        if left.turned != self.gives_back:
            # Those that are there keep their place by age: once theirs went, some conversations have no other window.
            self.given_back = {epoch: size} if self.by_age else {}
        else:
            self.given_back = {at: count for at, count in self.given_back.items() if at >= int(reach)}
        self.allowed = sum(self.given_back.values())
        self.gives_back = left.turned
        self.known = left.turned or left.asked_for

    def give_back(self, epoch: int) -> None:
        """A block of a window left went first."""
        self.given_back[epoch] = self.given_back.get(epoch, 0) + 1
        self.allowed += 1
        self._limit()

    def _allowed(self) -> float:
        return self.allowed if self.known else self.blocks
