"""The client's side of a replay: requests reach the engine, and answers reach the client, after a transport delay.

Wraps the `Feed`, which decides when requests may be sent. The player polls between steps; a request that was sent
during a step keeps its own time. Without delays (a nominal cost), `Transport` does the same as the `Feed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from kvtune.fake_device.cost import StepCost
from kvtune.workload.feed import Feed
from kvtune.workload.types import Workload


class Transport:
    """Delays the requests of a `Feed` and their answers. Times given to `arrivals` and `finished` must not decrease."""

    def __init__(
        self, workload: Workload, cost: StepCost, only: Collection[int] = (), at_once: int = 0
    ) -> None:
        self._feed = Feed(workload, only, at_once)
        self._enter_s, self._leave_s = cost.enter_us * 1e-6, cost.leave_us * 1e-6
        self._now_s = 0.0  # of the last event on the client's side
        self._leaving: deque[tuple[float, int]] = deque()
        self._entering: deque[tuple[float, int]] = deque()

    @property
    def done(self) -> bool:
        return self._feed.done

    def arrivals(self, now_s: float) -> list[tuple[int, float]]:
        """Return (position in the workload, time sent) of each request that reached the engine since the last call."""
        while (at := self._next_client_event()) is not None and at <= now_s:
            self._now_s = at
            while self._leaving and self._leaving[0][0] <= at:
                self._feed.finished(self._leaving.popleft()[1], at)
            self._entering.extend((at, index) for index in self._feed.ready(at))
        arrived = []
        while self._entering and self._entering[0][0] + self._enter_s <= now_s:
            sent_s, index = self._entering.popleft()
            arrived.append((index, sent_s))
        return arrived

    def finished(self, index: int, now_s: float) -> None:
        """Note that the engine has made the request's last token."""
        self._leaving.append((now_s + self._leave_s, index))

    def next_time(self) -> float | None:
        """Return the earliest time at which a request can reach the engine; None if another must finish first."""
        event = self._next_client_event()
        if self._entering:
            entry = self._entering[0][0] + self._enter_s
            return entry if event is None else min(entry, event)
        return event

    def _next_client_event(self) -> float | None:
        """Return when the client next sends a request or gets an answer; None if it only waits."""
        due = self._feed.next_time()
        if due is not None:
            due = max(due, self._now_s)
        if self._leaving:
            answered = self._leaving[0][0]
            return answered if due is None else min(answered, due)
        return due
