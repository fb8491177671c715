"""Finds how many sessions keep a share, from replays of several seeds. Pure: it names the next replay, others make it.

While a seed's replays lie on one side of the line, more sessions follow, up to twice as many, or fewer; then the number
where a straight line between two replays crosses. A replay within a point of the line ends the search: a session more
or less moves the share by as much, by chance. Other seeds begin there, and one replay near the line is enough of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, exp, floor, log, sqrt
from statistics import fmean, stdev

from kvtune.answers.capacity.result import Range
from kvtune.base.statistics import t_quantile

CLOSE = 0.01
"""A replay this near to the line ends a search."""
WIDE = 32
"""Numbers of sessions are told apart to one in this many."""
COARSE = 3
"""CLOSE is wider, and WIDE coarser, by this factor for all seeds after the first: seeds differ by more than that."""
FEW = 60
"""A share of fewer measured requests is an accident, and taken for kept."""
NEAR, FAR = 9 / 8, 2.0
"""Factors of the next number while all replays are on one side of the line: the least and the most."""
LINEAR = 0.05
"""Within this of the line, shares fall about linearly with sessions: a number between two replays is read off."""
CLIFF = 0.25
"""Between two replays that are further apart than this the next is in the middle: what falls there is not linear."""
MET = 0.9
"""Limits of latency hold where they are met by this share of the requests."""
SURE = 0.98
"""The range has the next seed's number with this probability, and five more seeds' with nine tenths (0.98 ** 5)."""
LEAST_SEEDS, ENOUGH_SEEDS = 5, 8
"""Seeds that are replayed in any case, and if there is time: then one more narrows the range by less than 5 %."""


@dataclass(slots=True)
class Search:
    """One seed's search. `shares`: by number of sessions, those that were replayed."""

    line: float
    most: int
    shares: dict[int, float] = field(default_factory=dict)

    @property
    def high(self) -> int:
        """The fewest sessions under the line; 0: none are."""
        return min((n for n, share in self.shares.items() if share < self.line), default=0)

    @property
    def low(self) -> int:
        """The most sessions above the line, of those that are fewer than `high`; 0: none are."""
        return max((n for n in self.shares if n < (self.high or self.most + 1)), default=0)

    @property
    def nearest(self) -> int:
        return min(filter(None, (self.low, self.high)), key=lambda n: abs(self.off(n)))

    def off(self, sessions: int) -> float:
        """Return by how much a replay is above the line."""
        return self.shares[sessions] - self.line

    def is_found(self, coarse: int = 1) -> bool:
        """Whether the number can be read off, `coarse` times as coarsely as where nothing else is known."""
        low, high, near = self.low, self.high, abs(self.off(self.nearest))
        if low and high and self.off(low) <= LINEAR and self.off(high) >= -LINEAR:
            return True
        narrow = high and high - low <= max(1, coarse * low // WIDE)
        return bool(narrow) or low >= self.most or near <= coarse * CLOSE

    def crossing(self, slope: float) -> float:
        """Return where the share crosses the line. `slope`: what a session costs there; 0: no search has ended."""
        low, high, near = self.low, self.high, self.nearest
        if low and high:
            return low + (high - low) * self.off(low) / (self.off(low) - self.off(high))
        if slope:
            return max(0.0, near + self.off(near) / slope)
        lost = 1 - self.shares[near]
        if len(self.shares) > 1:
            other = min({*self.shares} - {near}, key=lambda n: abs(n - near))
            secant = (self.shares[other] - self.shares[near]) / (near - other)
            factor = 1 + self.off(near) / near / max(secant, lost / near, 1e-9)
        else:  # what is lost grows with about the square of the sessions
            factor = sqrt((1 - self.line) / max(1e-9, lost))
        return near * (min(FAR, max(NEAR, factor)) if low else max(1 / FAR, min(1 / NEAR, factor)))

    def place(self, slope: float) -> float:
        """Return where the share crosses the line, between two replays; `most` + 1: all that are tried are above it."""
        if self.low >= self.most:
            return self.most + 1
        return min(max(self.low, self.crossing(slope)), self.high or self.most + 1)

    def number(self, slope: float) -> int:
        """Return the most sessions above the line."""
        return min(int(self.place(slope)), (self.high or self.most + 2) - 1)

    def next(self, slope: float, usual: float) -> int:
        """Return the number to replay next. `usual`: where others cross the line; 0: not known."""
        low, high = self.low, self.high or self.most + 1
        if low * (1 + 1 / WIDE) < round(usual) < high * (1 - 1 / WIDE):
            return round(usual)
        guess = round(self.crossing(slope))
        if not self.high:
            return min(max(guess, low + 1), int(FAR * low), self.most)
        if not low:
            return max(1, high // 2, min(guess, high - 1))
        is_cliff = self.off(low) - self.off(high) > CLIFF
        return guess if low < guess < high and not is_cliff else (low + high) // 2


@dataclass(slots=True)
class Searches:
    """The searches of one line. `first`: where they begin; `seeds`: how many in any case.

    When the first has ended, others begin where it crosses. Of these a replay near the line is enough: its number is
    read off by the slope that all have.
    """

    line: float
    most: int
    first: int
    seeds: int
    by_seed: dict[int, Search] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)

    def add(self, seed: int, sessions: int, share: float, requests: int) -> None:
        """Take a replay's share of its measured requests."""
        self.running.discard(seed)
        search = self.by_seed.setdefault(seed, Search(self.line, self.most))
        search.shares[sessions] = share if requests >= FEW else 1.0

    def next(self, further: bool = True) -> tuple[int, int] | None:
        """Return the sessions and seed to replay next, or None: all is found, or a running replay has to end first.

        `further`: there is time for more seeds.
        """
        slope, usual = self.slope, self.usual
        begun = self._begun
        waiting = [seed for seed in range(begun) if seed not in self.running and self._is_open(seed)]
        if not waiting and 0 < usual <= self.most and self._wanted(further):
            waiting = [begun]
        if not waiting:
            return None
        seed = waiting[0]
        self.running.add(seed)
        if seed in self.by_seed:
            return self.by_seed[seed].next(slope, usual), seed
        return min(round(usual) or self.first, self.most), seed

    @property
    def _begun(self) -> int:
        return 1 + max((self.seeds - 1, *self.by_seed, *self.running))

    def _is_open(self, seed: int) -> bool:
        """Whether a number is not known. Once one search has ended, of other seeds a replay near the line is enough."""
        search = self.by_seed.get(seed)
        return search is None or not search.is_found(COARSE if self.usual else 1)

    def crossed(self, seed: int) -> int:
        """Return the replay of a seed that is nearest to the line; 0: its search has not ended, or all are above it."""
        if not self.usual or self._is_open(seed) or self.by_seed[seed].low >= self.most:
            return 0
        return self.by_seed[seed].nearest

    @property
    def usual(self) -> float:
        """The mean number of sessions on the line, of the searches that have ended; 0: none has."""
        slope = self.slope
        numbers = [search.crossing(slope) for search in self.by_seed.values() if search.is_found()]
        return max(1.0, fmean(numbers)) if numbers else 0.0

    @property
    def about(self) -> int:
        """About where the line is crossed, as far as is known."""
        tried = [n for search in self.by_seed.values() for n in search.shares]
        return min(round(self.usual) or max(tried, default=self.first), self.most)

    @property
    def slope(self) -> float:
        """What a session costs near the line, by the replays of each seed; 0: no search has ended.

        A least-squares slope, less what a replay moves by chance; at least that of a line from no sessions, which keep
        everything.
        """
        if not any(search.is_found() for search in self.by_seed.values()):
            return 0.0
        spread = fall = 0.0
        for search in self.by_seed.values():
            ends = (
                sorted(search.shares, key=lambda n: abs(n - search.nearest))[:2] if search.is_found() else ()
            )
            near = [n for n in search.shares if n in ends or abs(search.off(n)) <= LINEAR]
            if near:
                middle, share = fmean(near), fmean(search.shares[n] for n in near)
                spread += sum((n - middle) ** 2 for n in near)
                fall += sum((n - middle) * (share - search.shares[n]) for n in near)
        least = (1 - self.line) / fmean(search.nearest for search in self.by_seed.values())
        return max(least, fall / spread - CLOSE / sqrt(spread)) if spread else least

    @property
    def numbers(self) -> list[int]:
        """The most sessions above the line, of each seed that was replayed."""
        return [search.number(self.slope) for _, search in sorted(self.by_seed.items())]

    @property
    def range(self) -> Range:
        """The sessions at which other seeds are expected above the line, and those at which they are not."""
        numbers, slope = self.numbers, self.slope
        if min(numbers) > self.most or not max(numbers):
            return Range(low=min(numbers), high=max(numbers), by_seed=numbers, most=self.most)
        places = [log(max(0.5, search.place(slope))) for search in self.by_seed.values()]
        mean, count = fmean(places), len(places)
        apart = CLOSE / max(slope * exp(mean), 1 - self.line)
        if count > 1:
            quantile = t_quantile((1 + SURE) / 2, count - 1)
            apart = max(apart, quantile * sqrt(1 + 1 / count) * stdev(places))
        low, high = floor(exp(mean - apart)), ceil(exp(mean + apart))
        high = min(max(*numbers, high, min(numbers) + 1), self.most + 1)
        return Range(low=min(*numbers, low), high=high, by_seed=numbers, most=self.most)

    def _wanted(self, further: bool) -> int:
        """How many more seeds there shall be."""
        return max(0, (ENOUGH_SEEDS if further else LEAST_SEEDS) - self._begun)

    def left(self, further: bool) -> int:
        """Return about how many replays follow those that run; before a search has ended, two more to end it."""
        waiting = [seed for seed in range(self.seeds) if seed not in self.running]
        return sum(map(self._is_open, waiting)) + self._wanted(further) + (0 if self.usual else 2)
