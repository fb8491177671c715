"""The client's side of a replay: requests reach the engine, and answers the client, some time after they left.

A `Feed` on the replay's clock. The engine looks at it between steps, so what happened during a step has its own time.
Without ways (a nominal cost) it is the Feed.
"""

from __future__ import annotations

from collections import deque

from kvtune.sim.cost import StepCost
from kvtune.workload.feed import Feed
from kvtune.workload.types import Workload


class FrontEnd:
    """`arrivals` and `finished` may only be told times that do not go back."""

    def __init__(self, workload: Workload, cost: StepCost) -> None:
        self._feed = Feed(workload)
        self._enter_s, self._leave_s = cost.enter_us * 1e-6, cost.leave_us * 1e-6
        self._now_s = 0.0  # of the last thing that happened here
        self._leaving: deque[tuple[float, int]] = deque()
        self._entering: deque[tuple[float, int]] = deque()

    @property
    def done(self) -> bool:
        return self._feed.done

    def arrivals(self, now_s: float) -> list[tuple[int, float]]:
        """The requests that have reached the engine by now, in order, and when each was sent."""
        while (at := self._next_here()) is not None and at <= now_s:
            self._now_s = at
            while self._leaving and self._leaving[0][0] <= at:
                self._feed.finished(self._leaving.popleft()[1], at)
            self._entering.extend((at, index) for index in self._feed.ready(at))
        here = []
        while self._entering and self._entering[0][0] + self._enter_s <= now_s:
            sent_s, index = self._entering.popleft()
            here.append((index, sent_s))
        return here

    def finished(self, index: int, now_s: float) -> None:
        """The engine has made the request's last token."""
        self._leaving.append((now_s + self._leave_s, index))

    def next_time(self) -> float | None:
        """A time before which no request reaches the engine; None when only a finish can help."""
        here = self._next_here()
        if self._entering:
            entry = self._entering[0][0] + self._enter_s
            return entry if here is None else min(entry, here)
        return here

    def _next_here(self) -> float | None:
        """When something happens on this side by itself."""
        due = self._feed.next_time()
        if due is not None:
            due = max(due, self._now_s)
        if self._leaving:
            left = self._leaving[0][0]
            return left if due is None else min(left, due)
        return due
