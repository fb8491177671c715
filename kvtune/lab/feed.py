"""Decides which requests may be sent now, by arrivals, turns, rounds and concurrency.

Pure, without a clock or I/O. The engine's driver and the simulator share it, so both send in the same order. Every
operation is O(log n) per request.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection

from kvtune.requests.types import Workload


class Feed:
    """One pass over `workload`. Times are seconds since the workload's start and must not decrease.

    A request is due when its arrival, its last predecessor's finish + think time and its round's start have passed.
    Due requests are sent in the order in which they became due (ties: workload order), up to the concurrency.

    `only`: positions of the requests to send (empty: all), for a run that ended early.
    """

    def __init__(self, workload: Workload, only: Collection[int] = ()) -> None:
        requests = workload.requests
        chosen = sorted(only) if only else range(len(requests))
        self._requests = requests
        self._room = len(requests) if workload.concurrency is None else workload.concurrency
        if self._room < 1 and requests:
            raise ValueError(f"with concurrency {self._room} no request can be sent")
        self._unfinished = len(chosen)
        self._state = bytearray(len(requests))  # 0 waiting, 1 in flight, 2 finished
        self._due: list[tuple[float, int]] = []
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._missing: dict[int, int] = {}  # how many of a request's predecessors have not finished
        self._release: dict[
            int, float
        ] = {}  # for requests of rounds that have not begun: the last predecessor's finish + think time
        self._rounds: list[int] = []  # rounds that have not begun, the next one last
        self._round_requests: defaultdict[int, list[int]] = defaultdict(list)
        self._round_left: defaultdict[int, int] = defaultdict(int)
        self._barrier = workload.barrier
        for index in chosen:
            request = requests[index]
            for after in request.after:
                self._check_after(index, after)
                self._followers[after].append(index)
            if request.after:
                self._missing[index] = len(request.after)
            if workload.barrier:
                self._round_requests[request.round].append(index)
                self._round_left[request.round] += 1
        self._open = -1
        if workload.barrier:
            self._rounds = sorted(self._round_left, reverse=True)
            self._open_rounds(0.0)
        else:
            for index in chosen:
                if not requests[index].after:
                    self._due.append((requests[index].arrival_s or 0.0, index))
            heapq.heapify(self._due)

    def ready(self, now_s: float) -> list[int]:
        """Return the requests to send now, in order, and count them as in flight."""
        sent = []
        while self._room and self._due and self._due[0][0] <= now_s:
            index = heapq.heappop(self._due)[1]
            self._state[index] = 1
            self._room -= 1
            sent.append(index)
        return sent

    def finished(self, index: int, now_s: float) -> None:
        """Note that request `index` has ended, normally or not, so that requests that wait for it become due."""
        if self._state[index] != 1:
            raise ValueError(f"request {index} is not in flight")
        self._state[index] = 2
        self._room += 1
        self._unfinished -= 1
        for follower in self._followers.pop(index, ()):
            self._missing[follower] -= 1
            if self._missing[follower]:
                continue
            del self._missing[follower]
            request = self._requests[follower]
            due_s = max(now_s + request.think_s, request.arrival_s or 0.0)
            if self._barrier and request.round > self._open:
                self._release[follower] = due_s
            else:
                heapq.heappush(self._due, (due_s, follower))
        if self._barrier:
            current = self._requests[index].round
            self._round_left[current] -= 1
            if not self._round_left[current] and current == self._open:
                self._open_rounds(now_s)

    def next_time(self) -> float | None:
        """Return the time from which `ready` returns a request if no request ends before; it may have passed.

        None: `ready` returns nothing until a request ends.
        """
        return self._due[0][0] if self._room and self._due else None

    @property
    def done(self) -> bool:
        """Whether all requests have finished."""
        return self._unfinished == 0

    def _open_rounds(self, now_s: float) -> None:
        if not self._rounds:
            return
        self._open = self._rounds.pop()
        for index in self._round_requests.pop(self._open):
            request = self._requests[index]
            if not request.after:
                heapq.heappush(self._due, (max(now_s, request.arrival_s or 0.0), index))
            elif index in self._release:
                heapq.heappush(self._due, (max(now_s, self._release.pop(index)), index))

    def _check_after(self, index: int, after: int) -> None:
        if not 0 <= after < index:
            raise ValueError(f"request {index} waits for request {after}, which does not come before it")
        if self._barrier and self._requests[after].round > self._requests[index].round:
            raise ValueError(f"request {index} waits for request {after} of a later round")
