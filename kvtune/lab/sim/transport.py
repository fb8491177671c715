"""The client's side of a replay: requests reach the engine, and answers reach the client, after a transport delay.

Wraps the `Feed`, which decides when requests may be sent. The player polls between steps; a request that was sent
during a step keeps its own time. Without delays (a nominal cost), `Transport` does the same as the `Feed`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from typing import Protocol

from kvtune.base.errors import KvtuneError
from kvtune.lab.device.cost import StepCost
from kvtune.lab.feed import Feed
from kvtune.requests.types import Workload


class Client(Protocol):
    """What an engine of a replay tells its client, and asks it."""

    def finished(self, index: int, now_s: float) -> None:
        """Note that the engine has made the request's last token."""

    def next_time(self) -> float | None:
        """Return the earliest time at which a request can reach this engine; None if another must end first."""


class Transport:
    """Delays the requests of a `Feed` and their answers. Times given to `arrivals` must not decrease.

    Several engines may report finished requests in any order, each at a time that `arrivals` has not been asked for.
    """

    def __init__(self, workload: Workload, cost: StepCost, only: Collection[int] = ()) -> None:
        self._feed = Feed(workload, only)
        self._enter_s, self._leave_s = cost.enter_us * 1e-6, cost.leave_us * 1e-6
        self._now_s = 0.0  # of the last event on the client's side
        self._leaving: list[tuple[float, int, int]] = []  # a heap: time, order of the reports, request
        self._reports = 0
        self._entering: deque[tuple[float, int]] = deque()

    @property
    def done(self) -> bool:
        return self._feed.done

    def arrivals(self, now_s: float) -> list[tuple[int, float]]:
        """Return (position in the workload, time sent) of each request that reached the engine since the last call."""
        while (event_s := self._next_client_event()) is not None and event_s <= now_s:
            self._now_s = event_s
            while self._leaving and self._leaving[0][0] <= event_s:
                self._answered(heapq.heappop(self._leaving)[2], event_s)
            self._entering.extend((event_s, index) for index in self._feed.ready(event_s))
        arrived = []
        while self._entering and self._entering[0][0] + self._enter_s <= now_s:
            sent_s, index = self._entering.popleft()
            arrived.append((index, sent_s))
        return arrived

    def finished(self, index: int, now_s: float) -> None:
        """Note that the engine has made the request's last token."""
        heapq.heappush(self._leaving, (now_s + self._leave_s, self._reports, index))
        self._reports += 1

    def next_time(self) -> float | None:
        """Return the earliest time at which a request can reach the engine; None if another must finish first."""
        event = self._next_client_event()
        if self._entering:
            entry = self._entering[0][0] + self._enter_s
            return entry if event is None else min(entry, event)
        return event

    def next_arrival(self) -> float:
        """Return the earliest time at which a request can reach an engine, while no engine has one."""
        due = self.next_time()
        if due is None:
            raise KvtuneError(
                "internal error: the replay stalled with unfinished requests", "report this with the workload"
            )
        return due

    def _answered(self, index: int, at_s: float) -> None:
        """Note that the client has got the request's last token."""
        self._feed.finished(index, at_s)

    def _next_client_event(self) -> float | None:
        """Return when the client next sends a request or gets an answer; None if it only waits."""
        due = self._feed.next_time()
        if due is not None:
            due = max(due, self._now_s)
        if self._leaving:
            answered = self._leaving[0][0]
            return answered if due is None else min(answered, due)
        return due
