"""Finds numbers of sessions by estimates: the largest that keeps a share of the hits, the first without room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt

from kvtune.answers.capacity.estimate import Engine, Estimate, Window, estimate
from kvtune.answers.capacity.result import Range
from kvtune.requests.loads.sessions import Load, Slots

MOST, LEAST = 512, 16
"""More sessions than the first are never looked for, fewer than the second always. Powers of two."""
MOST_REQUESTS = 20_000
"""Numbers of sessions that send about as many requests are not looked for: each replay would take minutes."""
LEAST_REQUESTS = 20
"""Of fewer measured requests a share means nothing, and is taken for kept."""
MET = 0.9
"""Limits of latency hold where they are met by this share of the requests."""
FULL = 0.5
"""A device is full where a prompt waits for its turn in more than this share of the time."""


@dataclass(slots=True)
class Estimates:
    """Estimates of a load on one engine, each made once. `near`: about the number of sessions that is looked for."""

    load: Load
    engine: Engine
    window: Window
    seeds: Sequence[int]
    near: int = 1
    made: int = 0
    _known: dict[tuple[int, int], Estimate] = field(default_factory=dict)
    _slots: dict[int, Slots] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """The most sessions that are looked for, a power of two."""
        sessions = self.load.sessions
        turns = sum(len(session.nodes) for session in sessions)
        each = (
            turns * self.window.end_s / max(1e-9, sum(sum(self.load.turn_s(session)) for session in sessions))
        )
        most = MOST
        while most > LEAST and most * each > MOST_REQUESTS:
            most //= 2
        return most

    def at(self, seed: int, sessions: int) -> Estimate:
        kept = self._known.get((seed, sessions))
        if kept is None:
            if seed not in self._slots:
                self._slots[seed] = Slots(self.load, seed)
            kept = estimate(self._slots[seed], sessions, self.engine, self.window)
            self._known[seed, sessions] = kept
            self.made += 1
        return kept

    def kept(self, sessions: int, seeds: Sequence[int]) -> float:
        """Return the mean share of the hits that is kept."""
        return sum(self.at(seed, sessions).kept for seed in seeds) / len(seeds)

    def keeping(self, share: float, seeds: Sequence[int] = ()) -> Range:
        """Return, by seed, the most sessions that keep this share of an infinite cache's hits. `seeds`: default all."""
        return Range.of(self._by_seed(lambda seed: partial(self._keeps, seed, share), seeds), self.most)

    def filling(self, seeds: Sequence[int] = ()) -> Range:
        """Return, by seed, the fewest sessions with which a prompt waits in more than `FULL` of the time."""
        numbers = self._by_seed(lambda seed: partial(self._has_room, seed), seeds)
        return Range.of([1 + number for number in numbers], self.most)

    def meeting(self, limits: Mapping[str, float]) -> Range:
        """Return, by seed, the most sessions of whose requests a share of `MET` is within the limits."""
        return Range.of(self._by_seed(lambda seed: partial(self._meets, seed, limits)), self.most)

    def _by_seed(self, holds: Callable[[int], Callable[[int], bool]], seeds: Sequence[int] = ()) -> list[int]:
        """Return, by seed, the largest number for which `holds(seed)` holds. Seeds are near to each other."""
        numbers: list[int] = []
        for seed in seeds or self.seeds:
            self.near = largest(holds(seed), self.most, self.near)
            numbers.append(self.near)
        return numbers

    def _meets(self, seed: int, limits: Mapping[str, float], sessions: int) -> bool:
        estimate = self.at(seed, sessions)
        return estimate.requests < LEAST_REQUESTS or estimate.met(limits) >= MET

    def _keeps(self, seed: int, share: float, sessions: int) -> bool:
        estimate = self.at(seed, sessions)
        return estimate.requests < LEAST_REQUESTS or estimate.kept >= share

    def _has_room(self, seed: int, sessions: int) -> bool:
        return self.at(seed, sessions).waiting <= FULL

    def on(self, engine: Engine) -> Estimates:
        """Return estimates of the same load on another engine."""
        grown = max(engine.pool, engine.cache) / max(self.engine.pool, self.engine.cache)
        return Estimates(self.load, engine, self.window, self.seeds, int(self.near * grown))


def largest(holds: Callable[[int], bool], most: int = MOST, near: int = 1) -> int:
    """Return the largest number up to `most` for which this holds, as if it held for all below; 0: not for 1.

    `most` + 1: it holds for that, too. `near`: about where it is; each number is asked of once.
    """
    near = min(max(1, near), most)
    step = max(1, near // 8)
    if holds(near):
        low, high = near, min(near + step, most + 1)
        while high <= most and holds(high):
            step *= 2
            low, high = high, min(high + step, most + 1)
    else:
        low, high = max(near - step, 0), near
        while low and not holds(low):
            step *= 2
            low, high = max(low - step, 0), low
    while high - low > 1:
        half = (low + high) // 2
        if holds(half):
            low = half
        else:
            high = half
    return most + 1 if low == most else low


def fitted(estimates: Estimates, sessions: int, seeds: Sequence[int], kept: float) -> float:
    """Return the factor of the pool with which the estimate keeps as much as replays of these seeds did."""
    low, high = 1 / 16, 4.0
    for _ in range(10):
        factor = sqrt(low * high)
        engine = replace(estimates.engine, pool=max(1, int(estimates.engine.pool * factor)))
        if estimates.on(engine).kept(sessions, seeds) < kept:
            low = factor
        else:
            high = factor
    return sqrt(low * high)
