"""What blocks have been worth by class and age: hits per block-time, from the pool and from what was evicted.

An age counts blocks freed since the block itself was, in epochs of 1/32 of the pool. `left` has how many blocks of a
class are of each epoch, evicted ones included as long as they are remembered: from it follow the blocks that had a
chance to be hit at an age (so an eviction hides nothing), and how far back a pool that evicts by age would reach.
Counts are halved every eight pool sizes.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

EPOCHS_A_POOL = 32
FEWEST = 64
"""Blocks of an epoch, so that in a small pool its end costs little a block; but at least eight epochs a pool."""
HALVED_AFTER = 8 * EPOCHS_A_POOL
OLDEST = 255
"""Ages in epochs end here; what is older counts as this old."""
SMOOTHED = 2.0
"""Where fewer chances were seen at an age than this many pools of blocks, its rate leans on that of younger ones."""


def _widths() -> list[int]:
    """Bins of ages, in epochs: single ones first, then four bins a doubling."""
    widths = [1] * 8
    while sum(widths) <= OLDEST:
        widths += [sum(widths) // 4] * 4
    return widths


WIDTHS = _widths()
ENDS = list(accumulate(WIDTHS))
STARTS = [end - width for end, width in zip(ENDS, WIDTHS, strict=True)]
BIN_OF = [number for number, width in enumerate(WIDTHS) for _ in range(width)]


SINGLE, REUSED, NEAR, OUTPUT = range(4)
"""Classes: used once; came back; kept near a prompt's end for other suffixes; kept at an output's end for a next turn.
Only the first two have values."""


class Ages:
    """Everything is O(1) but `tick` and `reach`, which come once an epoch."""

    def __init__(self, blocks: int) -> None:
        self.length = max(1, blocks // EPOCHS_A_POOL, min(FEWEST, blocks // 8))
        self.epoch = 1
        self.left = tuple(array("q", [0]) * (OLDEST + 1) for _ in range(4))
        self._views = tuple(np.frombuffer(left, np.int64) for left in self.left)
        """Blocks are counted one by one, and added up as vectors: the same numbers, quick both ways."""
        self.hits = ([0.0] * len(WIDTHS), [0.0] * len(WIDTHS))
        self.chances = (np.zeros(len(WIDTHS)), np.zeros(len(WIDTHS)))
        self.smoothed = SMOOTHED * blocks
        self._rates: dict[int, list[float]] = {}
        self._values: dict[tuple[int, int], float] = {}

    def came(self, kind: int, count: int) -> None:
        """So many blocks of a class became free in this epoch."""
        self.left[kind][self.epoch & OLDEST] += count

    def went(self, kind: int, epoch: int) -> None:
        """A block of this epoch is forgotten, or in use again. Of the epoch 16 bits count."""
        age = (self.epoch - epoch) & 0xFFFF
        self.left[kind][(self.epoch - min(age, OLDEST)) & OLDEST] -= 1

    def hit(self, kind: int, epoch: int, count: int = 1) -> None:
        """Blocks of this epoch were asked for."""
        age = min((self.epoch - epoch) & 0xFFFF, OLDEST)
        if kind <= REUSED:
            self.hits[kind][BIN_OF[age]] += count
        self.left[kind][(self.epoch - age) & OLDEST] -= count

    def tick(self) -> None:
        """An epoch ends."""
        now = self.epoch
        start = (now + 1) & OLDEST
        for kind, chances in enumerate(self.chances):
            chances += np.add.reduceat(self._by_age(kind), STARTS)
        for left in self.left:
            # The oldest join the next ones: the epoch that begins takes their place.
            left[(now + 2) & OLDEST] += left[start]
            left[start] = 0
        self.epoch = now + 1
        self._rates.clear()
        self._values.clear()
        if self.epoch % HALVED_AFTER == 0:
            for hits, chances in zip(self.hits, self.chances, strict=True):
                hits[:] = [count / 2 for count in hits]
                chances /= 2

    def reach(self, free: int, kinds: Collection[int] = (SINGLE, REUSED)) -> float:
        """The epoch, with a fraction, back to which a pool holds blocks of these classes that evicts them by age."""
        held = np.add.reduce([self._by_age(kind) for kind in kinds]).cumsum()
        age = int(held.searchsorted(free, "right"))
        if age >= OLDEST:
            return 0.0
        younger = int(held[age - 1]) if age else 0
        return self.epoch - age + 1 - (free - younger) / (int(held[age]) - younger)

    def _by_age(self, kind: int) -> NDArray[np.int64]:
        """Blocks of a class that are left, by age in epochs."""
        left, start = self._views[kind], (self.epoch + 1) & OLDEST
        return np.concatenate((left[start:], left[:start]))[::-1]

    def traded(self, reach: float) -> tuple[int, int]:
        """Epochs (single, reused) back to which a pool holds them that keeps reused blocks twice as long as age does.

        It holds as many blocks in all, so it has fewer single ones.
        """
        single, reused = self._by_age(SINGLE).tolist(), self._by_age(REUSED).tolist()
        now, oldest = self.epoch, self.epoch - int(reach)
        spare = sum(single[:oldest])
        kept, age = 0, oldest
        while age < min(2 * oldest, OLDEST) and kept + reused[age + 1] <= spare:
            age += 1
            kept += reused[age]
        held = min(oldest, OLDEST + 1)
        while held > 0 and kept > 0:
            held -= 1
            kept -= single[held]
        return now - held, now - age

    def value(self, kind: int, epoch: int) -> float:
        """The most hits per epoch that a block of this epoch can be expected to have, over any horizon from now."""
        age = min(self.epoch - epoch, OLDEST)
        known = self._values.get((kind, age))
        if known is None:
            known = self._values[kind, age] = self._value(kind, age)
        return known

    def _value(self, kind: int, age: int) -> float:
        rates = self._rates.get(kind)
        if rates is None:
            rates = self._rates[kind] = self._smooth(kind)
        left, time, found, best = 1.0, 0.0, 0.0, 0.0
        for number in range(BIN_OF[age], len(WIDTHS)):
            width = min(WIDTHS[number], ENDS[number] - age)
            share = min(1.0, rates[number] * width)
            found += left * share
            time += left * width * (1 - share / 2)
            left *= 1 - share
            best = max(best, found / time)
        return best

    def _smooth(self, kind: int) -> list[float]:
        """Hits of a block in an epoch, by bin."""
        hits, chances = self.hits[kind], self.chances[kind].tolist()
        rate = sum(hits) / max(1.0, sum(chances))
        rates = []
        for hit, chance in zip(hits, chances, strict=True):
            rate = (hit + self.smoothed * rate) / (chance + self.smoothed)
            rates.append(rate)
        return rates
