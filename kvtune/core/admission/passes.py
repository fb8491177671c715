"""Who was passed by later arrivals in a queue, since when and until when; O(log n) a question. Runs in EngineCore.

Requests have the number of their arrival. Whoever is admitted passes everybody who waits with a smaller number, so a
request was first passed by the first larger number, and last by the last larger one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

NUMBER = itemgetter(0)


class Passes:
    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []  # numbers rise with time; when they passed
        self._last: list[tuple[int, float]] = []  # numbers fall with time; until when it was their turn
        self._open = False  # the last of these has just been admitted, and nobody since

    def admitted(self, at_s: float) -> None:
        """Somebody is next: the turn of whoever passed others before is over."""
        if self._open:
            self._last[-1] = (self._last[-1][0], at_s)
            self._open = False

    def passed(self, number: int, at_s: float) -> None:
        """Somebody was admitted before requests with smaller numbers."""
        if not self._first or self._first[-1][0] < number:
            self._first.append((number, at_s))
        last = self._last
        while last and last[-1][0] <= number:
            last.pop()
        last.append((number, at_s))
        self._open = True

    def forget(self, number: int) -> None:
        """Nobody waits with a smaller number."""
        first = self._first
        if first and first[0][0] <= number:
            del first[: bisect_right(first, number, key=NUMBER)]

    def since_s(self, number: int) -> float | None:
        """When this request was first passed; None while it was not."""
        at = bisect_right(self._first, number, key=NUMBER)
        return self._first[at][1] if at < len(self._first) else None

    def wait_s(self, number: int, now_s: float) -> float | None:
        """From the first admission that passed it until the last one's turn was over; None when nobody did."""
        since_s = self.since_s(number)
        if since_s is None:
            return None
        at = bisect_left(self._last, -number, key=lambda one: -one[0]) - 1
        until_s = now_s if self._open and at == len(self._last) - 1 else self._last[at][1]
        return until_s - since_s
