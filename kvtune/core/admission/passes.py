"""Records which requests of a queue were overtaken, since when and until when; O(log n) per question. EngineCore.

Requests are numbered by arrival. A request that is admitted overtakes all waiting requests with smaller numbers, so a
request was first overtaken by the first larger number that was admitted, and last by the last one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

NUMBER = itemgetter(0)


class Passes:
    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []  # number, time of admission; numbers rise with time
        self._last: list[tuple[int, float]] = []  # number, end of its turn; numbers fall with time
        self._open = False  # no request was admitted since the last of these

    def admitted(self, at_s: float) -> None:
        """A request was admitted: the turn of the last one that overtook others is over."""
        if self._open:
            self._last[-1] = (self._last[-1][0], at_s)
            self._open = False

    def passed(self, number: int, at_s: float) -> None:
        """Request `number` was admitted before waiting requests with smaller numbers."""
        if not self._first or self._first[-1][0] < number:
            self._first.append((number, at_s))
        last = self._last
        while last and last[-1][0] <= number:
            last.pop()
        last.append((number, at_s))
        self._open = True

    def forget(self, number: int) -> None:
        """No request waits with a smaller number than this."""
        first = self._first
        if first and first[0][0] <= number:
            del first[: bisect_right(first, number, key=NUMBER)]

    def since_s(self, number: int) -> float | None:
        """When this request was first overtaken; None if it was not."""
        at = bisect_right(self._first, number, key=NUMBER)
        return self._first[at][1] if at < len(self._first) else None

    def wait_s(self, number: int, now_s: float) -> float | None:
        """From the first admission that overtook it to the end of the last one's turn; None if none did."""
        since_s = self.since_s(number)
        if since_s is None:
            return None
        at = bisect_left(self._last, -number, key=lambda one: -one[0]) - 1
        until_s = now_s if self._open and at == len(self._last) - 1 else self._last[at][1]
        return until_s - since_s
