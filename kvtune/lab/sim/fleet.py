"""N EngineCores on one virtual clock, and a router before them. Simulator's process only.

Exact: the replica with the earliest clock makes the next step, and requests are routed in the order of their times. A
replica takes many steps at once only up to the time at which another could cause a request to be sent to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.build import build, choose_core, uncollected
from kvtune.lab.sim.clock import VirtualClock
from kvtune.lab.sim.engine_types import EngineCore, Observer, ReplayProgress
from kvtune.lab.sim.player import INTERRUPTED, Pulse, Replica
from kvtune.lab.sim.routers import KINDS
from kvtune.lab.sim.transport import Transport
from kvtune.plugin.core import state
from kvtune.plugin.vllm.types import Request
from kvtune.requests.types import Workload


class Member:
    """One engine of a fleet: its clock, the books of its core, its place. Also its side of the shared client."""

    def __init__(self, fleet: Fleet, place: int, setup: Setup, installed: state.Books) -> None:
        self._fleet, self._place = fleet, place
        self.clock = VirtualClock()
        self.books = installed.branch(self.clock)
        with state.using(self.books):
            self.engine: EngineCore = build(setup, self.clock)

    def begin(self, observers: Sequence[Observer]) -> None:
        fleet = self._fleet
        self.replica = Replica(fleet.workload, fleet.sim, self.engine, self.clock, self, observers)
        self.replica.begin()

    @property
    def busy(self) -> bool:
        return self.replica.busy

    # What its engine asks and tells (transport.Client).

    def finished(self, index: int, now_s: float) -> None:
        self._fleet.client.finished(index, now_s)

    def next_time(self) -> float | None:
        """Return when a request may reach this engine at the earliest: one that is known, or after another's answer."""
        client_s, others = self._fleet.client.next_time(), self._fleet.horizon_s(self._place)
        return min((time_s for time_s in (client_s, others) if time_s is not None), default=None)

    # What a router may ask (routers.Engine).

    @property
    def counts(self) -> tuple[int, int, float]:
        scheduler = self.engine.scheduler
        running, waiting = scheduler.get_request_counts()
        return waiting, running, scheduler.get_kv_cache_usage()

    def cached(self, request: Request) -> int:
        coordinator = self.engine.scheduler.kv_cache_manager.coordinator
        return int(coordinator.find_longest_cache_hit(request.block_hashes, request.num_prompt_tokens - 1)[1])


class SharedClient(Transport):
    """The client of all engines. Tells the router of each answer at the time at which the client gets it."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.workload, fleet.sim.cost, fleet.sim.requests)
        self._fleet = fleet

    def _answered(self, index: int, at_s: float) -> None:
        super()._answered(index, at_s)
        self._fleet.router.answered(index, int(self._fleet.served_by[index]))


class Fleet:
    """Plays a workload once on `replicas` engines. `served_by`: each request's replica, -1 if not sent."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        self.workload, self.sim = workload, setup.simulated
        self.now_s = 0.0
        self.members: list[Member] = []
        choose_core(setup)
        installed = state.books()
        try:
            for place in range(self.sim.replicas):
                self.members.append(Member(self, place, setup, installed))
        except BaseException:
            self.shutdown()
            raise
        self.client = SharedClient(self)
        self.router = KINDS[self.sim.router](workload, self.sim, self.members)
        self.served_by: NDArray[np.int16] = np.full(len(workload.requests), -1, "i2")
        self._lag_s = least_think_s(workload)

    def shutdown(self) -> None:
        for member in self.members:
            with suppress(Exception):
                member.engine.scheduler.shutdown()

    def horizon_s(self, place: int) -> float | None:
        """Return when an answer of another engine may lead to a request at the earliest; None if no other is busy."""
        clocks = [member.clock.now_s for i, member in enumerate(self.members) if i != place and member.busy]
        if not clocks:
            return None
        # At the time of this engine's next step, all requests are known: no other engine's clock is earlier.
        now_s = self.members[place].clock.now_s
        return max(min(clocks) + self._lag_s, math.nextafter(now_s, math.inf))

    @property
    def ended_s(self) -> float:
        return max(self.now_s, *(member.clock.now_s for member in self.members))

    def play(
        self,
        observers: Sequence[Sequence[Observer]],
        progress: Callable[[ReplayProgress], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> str:
        """Run the replay. Return why it ended early, or "". `observers`: each replica's."""
        for member, watching in zip(self.members, observers, strict=True):
            member.begin(watching)
        requests = len(self.sim.requests) or len(self.workload.requests)
        with uncollected():
            try:
                return self._play(Pulse(requests, progress, stop))
            except KeyboardInterrupt:
                return INTERRUPTED

    def _play(self, pulse: Pulse) -> str:
        client, end_s = self.client, self.sim.end_s or math.inf
        while True:
            next_one = self._earliest()
            at_s = client.next_time()
            if at_s is not None and (next_one is None or at_s <= next_one.clock.now_s):
                self._deliver(at_s)
                if next_one is None and at_s >= end_s:
                    return ""
                continue
            if client.done:
                return ""
            if next_one is None:
                client.next_arrival()  # raises
                continue
            if next_one.clock.now_s >= end_s:
                return ""
            if pulse.stopped(sum(member.replica.finished for member in self.members), next_one.clock.now_s):
                return INTERRUPTED
            self._step(next_one)

    def _earliest(self) -> Member | None:
        """Return the busy replica with the earliest clock."""
        busy = [member for member in self.members if member.busy]
        return min(busy, key=lambda member: member.clock.now_s, default=None)

    def _deliver(self, at_s: float) -> None:
        """Route the requests that reach the engines at this time."""
        self.now_s = max(self.now_s, at_s)
        factory = self.members[0].replica.factory
        for index, sent_s in self.client.arrivals(at_s):
            request = factory.make(index, sent_s)
            place = self.router.send(index, request, sent_s)
            self.served_by[index] = place
            member = self.members[place]
            member.clock.advance_to(at_s)
            state.use(member.books)
            member.replica.add(index, request, sent_s)

    def _step(self, member: Member) -> None:
        place = self.members.index(member)
        state.use(member.books)
        self.router.looked(place, member.clock.now_s)
        member.replica.turn()
        self.router.looked(place, member.clock.now_s)


def least_think_s(workload: Workload) -> float:
    """Return the least time from one request's answer until it can lead to another's sending; infinite if it cannot."""
    if workload.concurrency is not None or workload.barrier:
        return 0.0
    return min((request.think_s for request in workload.requests if request.after), default=math.inf)
