"""How much longer replays take, from how long those of the same command took. Says nothing before one has ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from kvtune.base.clock import Clock

ENOUGH = 0.05
"""From this share of a replay on, its own pace counts."""
FADES = 0.5
"""How much a replay counts beside the next that ended: a machine gets other work."""


@dataclass(slots=True)
class Pace:
    """`at_once`: replays that run side by side. The work of a replay is its length beside that of others."""

    at_once: int = 1
    clock: Clock = field(default_factory=Clock)
    saved_s: float = 0.0
    """How long those have taken that had been made before."""
    _begun: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The work of each replay that runs, and when it began."""
    _ends_s: dict[int, float] = field(default_factory=dict)
    """When those end that have said how far they are."""
    _ended: float = 0.0
    _done: float = 0.0
    _starting_s: float = 0.0
    _playing_s: float = 0.0

    def begin(self, number: int, work: float) -> None:
        self._begun[number] = work, self.clock.now()

    def report(self, number: int, share: float, playing_s: float) -> None:
        """A replay has played this share in this time."""
        if share >= ENOUGH:
            self._ends_s[number] = self.clock.now() + playing_s * (1 / min(1.0, share) - 1)

    def end(self, number: int, starting_s: float = 0.0, playing_s: float = 0.0) -> None:
        """A replay has ended, which has played after `starting_s`; 0: it says nothing of the others.

        `playing_s`: for how long at least. It had been made before if that is longer ago than it began.
        """
        work, begun_s = self._begun.pop(number)
        self._ends_s.pop(number, None)
        took_s = self.clock.now() - begun_s
        self.saved_s += max(0.0, starting_s + playing_s - took_s)
        if starting_s:
            took_s = max(took_s, starting_s + playing_s)
            self._ended, self._done = self._ended * FADES + 1, self._done * FADES + work
            self._starting_s = self._starting_s * FADES + starting_s
            self._playing_s = self._playing_s * FADES + took_s - starting_s

    def left_s(self, following: Iterable[float] = ()) -> float | None:
        """Return the seconds until all have ended, those too that follow in this order. None: not known yet."""
        if not self._ended:
            return None
        now_s, each_s = self.clock.now(), self._starting_s / self._ended
        work_s = self._playing_s / self._done
        ends_s = {number: begun_s + each_s + work_s * work for number, (work, begun_s) in self._begun.items()}
        lanes = [max(0.0, end_s - now_s) for end_s in (ends_s | self._ends_s).values()]
        lanes += [0.0] * (self.at_once - len(lanes))
        heapify(lanes)
        for work in following:
            heapreplace(lanes, lanes[0] + each_s + work_s * work)
        return max(lanes)
