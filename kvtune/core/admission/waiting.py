"""The waiting queue of `admission=longest_prefix`: the request with most cached tokens goes first. EngineCore.

Contract: the scheduler sees vLLM's RequestQueue. Stock's order applies
  - until the first request has waited through a whole step, and among requests with equally many cached tokens;
  - to requests that return to the queue (preempted, skipped): they go before all others;
  - to requests with structured output, streaming input, or computed tokens: no overtaking in either direction;
  - behind a request that was first overtaken `age_s` ago or longer: no request overtakes it any more.
After an exception in our own bookkeeping stock's order applies for good, and the state says so.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from kvtune.core import state
from kvtune.core.admission.passes import Passes
from kvtune.core.admission.prefixes import Place, Prefixes
from kvtune.core.vllm_types import Scheduler

logger = logging.getLogger("vllm.kvtune")

RETURNED = -1
"""The arrival number of requests that return to the queue."""


class LongestPrefixQueue(RequestQueue):  # type: ignore[misc]
    reorders = True

    def __init__(self, scheduler: Scheduler, prefixes: Prefixes, age_s: float) -> None:
        self._scheduler, self._prefixes, self._age_s = scheduler, prefixes, age_s
        self._queue: OrderedDict[str, Place] = OrderedDict()  # in stock's order
        self._arrivals = 0
        self._fence: Place | None = None  # the first queued arrival that may not be overtaken
        self._behind: deque[Place] = deque()  # arrivals behind it
        self._chosen: Place | None = None
        self._by_age = False  # it was chosen because of its age
        self._left: list[tuple[Place, float, bool]] = []  # popped, when, by age; not yet known if admitted
        self._passes = Passes()
        self.off = ""
        self.admitted = self.ahead = self.overtaken = self.by_age = 0
        self.longest_wait_s = 0.0

    # Called by vLLM's scheduler.

    def add_request(self, request: Request) -> None:
        place = Place(request, self._arrivals, self._scheduler.current_step, _fixed(request))
        self._arrivals += 1
        self._queue[request.request_id] = place
        self._enqueue(place)

    def prepend_request(self, request: Request) -> None:
        self._queue[request.request_id] = Place(request, RETURNED, RETURNED, True)
        self._queue.move_to_end(request.request_id, last=False)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        first = self._first()
        self._chosen, self._by_age = first, False
        if not (self.off or first.fixed):
            try:
                self._settle()
                self._chosen = self._choose(first)
            except Exception as error:
                self._give_up(error)
                self._chosen = first
        return self._chosen.request

    def pop_request(self) -> Request:
        place = self._chosen
        if place is None or place.gone:
            place = self._first()
        by_age, self._chosen = self._by_age, None
        self._remove(place)
        if not (self.off or place.fixed):
            self._left.append((place, state.clock(), by_age))
        return place.request

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            place = self._queue.get(request.request_id)
            if place is not None and place.request is request:
                self._remove(place)
                if not (self.off or place.fixed):
                    self._note_wait(place, state.clock())

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return (place.request for place in self._queue.values())

    # Not part of vLLM's interface.

    def counters(self) -> dict[str, int]:
        """Counters for the run file. Called by another thread, so it changes nothing.

        Overtaken requests are counted when they are admitted, or aborted by their clients.
        """
        left = [entry for entry in tuple(self._left) if entry[0].request.status >= RequestStatus.RUNNING]
        waits_s = [
            wait_s
            for place, at_s, _ in left
            if (wait_s := self._passes.wait_s(place.number, at_s)) is not None
        ]
        return {
            "admission_admitted": self.admitted + len(left),
            "admission_ahead": self.ahead,
            "admission_overtaken": self.overtaken + len(waits_s),
            "admission_by_age": self.by_age + sum(by_age for _, _, by_age in left),
            "admission_longest_wait_us": round(max(self.longest_wait_s, *waits_s, 0.0) * 1e6),
        }

    def _first(self) -> Place:
        if not self._queue:
            raise IndexError("peek from an empty queue")
        return next(iter(self._queue.values()))

    def _choose(self, first: Place) -> Place:
        if self._scheduler.current_step - first.step <= 1:
            return first  # it has not waited through a whole step
        self._passes.forget(first.number)
        since_s = self._passes.since_s(first.number)
        if since_s is not None and state.clock() - since_s >= self._age_s:
            lead = self._prefixes.lead()
            self._by_age = lead is not None and lead.length > first.length
            return first
        return self._prefixes.best() or first

    def _enqueue(self, place: Place) -> None:
        if self._fence is not None:
            self._behind.append(place)
        elif place.fixed:
            self._fence = place
        else:
            self._prefixes.add(place)

    def _remove(self, place: Place) -> None:
        del self._queue[place.request.request_id]
        self._prefixes.remove(place)
        if place is self._fence:
            self._fence = None
            behind, self._behind = self._behind, deque()
            for one in behind:
                if not one.gone:
                    self._enqueue(one)

    def _settle(self) -> None:
        """Count requests that were admitted since the last call. Those that were only skipped return to the front."""
        left, self._left = self._left, []
        for place, at_s, by_age in left:
            request = place.request
            if request.status < RequestStatus.RUNNING:
                if request.request_id not in self._queue:
                    self._left.append((place, at_s, by_age))
                continue
            self.admitted += 1
            self.by_age += by_age
            self._passes.admitted(at_s)
            self._note_wait(place, at_s)
            if any(one.number < place.number for one in self._waiting_longest()):
                self.ahead += 1
                self._passes.passed(place.number, at_s)

    def _waiting_longest(self) -> Iterator[Place]:
        """The first arrival in the queue, leaving out requests that returned."""
        for place in self._queue.values():
            if place.number != RETURNED:
                yield place
                return

    def _note_wait(self, place: Place, at_s: float) -> None:
        wait_s = self._passes.wait_s(place.number, at_s)
        if wait_s is not None:
            self.overtaken += 1
            self.longest_wait_s = max(self.longest_wait_s, wait_s)

    def _give_up(self, error: Exception) -> None:
        self.off = f"gave up: {type(error).__name__}: {error}"
        self._left.clear()
        state.part("admission", False, f"{self.off}; requests are admitted as they came from here on")
        logger.warning("kvtune: admission is first come, first served again: %s", self.off, exc_info=error)


def _fixed(request: Request) -> bool:
    """Whether stock has rules of its own for this request, beyond first come, first served."""
    return bool(
        request.status != RequestStatus.WAITING
        or request.resumable
        or request.structured_output_request is not None
        or request.num_computed_tokens
        or request.num_preemptions
    )
