"""Routers: which replica of a fleet gets each request. Simulator's process only.

A router sees what a real one could: which requests it has sent, which are answered, what engines publish. `prefix` sees
more: it asks every engine's real cache. `least-busy` is vLLM's own data-parallel balancer, called with what the
coordinator would have told it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol
from zlib import crc32

from kvtune.base.errors import KvtuneError
from kvtune.data.run.extras import GIVEN
from kvtune.lab.setup.setup import Simulated
from kvtune.plugin.vllm.types import Request
from kvtune.requests.types import Workload

NEW_SHARE = 0.3
"""`prefix` sends a prompt of which every cache has less than this share to the least busy replica."""

SNAPSHOT_S = 0.1
"""vLLM's coordinator tells the front end of changed loads at most once in this time."""


@dataclass(slots=True)
class Load:
    """What a router has sent to one replica."""

    in_flight: int = 0
    requests: int = 0
    prompt_tokens: int = 0


class Engine(Protocol):
    """What may be asked of a replica's engine."""

    @property
    def counts(self) -> tuple[int, int, float]:
        """Waiting requests, running requests, share of the KV cache in use: what vLLM's engine publishes."""
        ...

    def cached(self, request: Request) -> int:
        """Return how many of the prompt's tokens would hit now."""
        ...


class Router:
    """Sends every request to the first replica. Subclasses choose."""

    def __init__(self, workload: Workload, settings: Simulated, engines: Sequence[Engine]) -> None:
        self.workload, self.settings, self.engines = workload, settings, engines
        self.loads = [Load() for _ in engines]

    def send(self, index: int, request: Request, at_s: float) -> int:
        """Return the replica for a request that is sent at `at_s`, and count it as in flight there."""
        chosen = self.choose(index, request, at_s)
        load = self.loads[chosen]
        load.in_flight += 1
        load.requests += 1
        load.prompt_tokens += request.num_prompt_tokens
        return chosen

    def choose(self, index: int, request: Request, at_s: float) -> int:
        return 0

    def answered(self, index: int, replica: int) -> None:
        """Note that the client has got a request's answer."""
        self.loads[replica].in_flight -= 1

    def looked(self, replica: int, at_s: float) -> None:
        """Called before and after each of a replica's steps, at that time of the replica's clock."""

    def least(self, replicas: Sequence[int]) -> int:
        """Return the replica with the fewest requests in flight; of several, that with the fewest prompt tokens."""
        loads = self.loads
        return min(
            replicas, key=lambda replica: (loads[replica].in_flight, loads[replica].prompt_tokens, replica)
        )


class RoundRobin(Router):
    """Each replica in turn."""

    def choose(self, index: int, request: Request, at_s: float) -> int:
        return sum(load.requests for load in self.loads) % len(self.loads)


class Session(Router):
    """All requests of a session to one replica, by a hash. Where a load names no sessions, prompts tell."""

    def __init__(self, workload: Workload, settings: Simulated, engines: Sequence[Engine]) -> None:
        super().__init__(workload, settings, engines)
        self._ends: dict[bytes, int] = {}  # the hash at each sent prompt's end -> the session's first request
        self._begins: dict[int, bytes] = {}  # request -> the hash of its first block
        self._session: dict[int, int] = {}

    def choose(self, index: int, request: Request, at_s: float) -> int:
        session = self.workload.requests[index].session
        if session >= 0:
            return crc32(b"session %d" % session) % len(self.loads)
        first = self._session[index] = self._first_of(index, request)
        return crc32(self.workload.requests[first].id.encode()) % len(self.loads)

    def _first_of(self, index: int, request: Request) -> int:
        """Return the first request of this one's session.

        A prompt that begins with an earlier one goes on with its session, and so does one that is sent after another
        and begins as that does (its conversation was cut short). Any other begins a session.
        """
        hashes = request.block_hashes
        earlier = (self._ends.get(block_hash) for block_hash in reversed(hashes))
        session = next((first_request for first_request in earlier if first_request is not None), None)
        if hashes:
            self._begins[index] = hashes[0]
        if session is None and hashes:
            before = self.workload.requests[index].after
            if before and self._begins.get(before[0]) == hashes[0]:
                session = self._session[before[0]]
        session = index if session is None else session
        if hashes:
            self._ends[hashes[-1]] = session
        return session


class LeastBusy(Router):
    """vLLM's own choice, by its own code: DPLBAsyncMPClient of `vllm serve --data-parallel-size N`.

    One API server. An engine's counts reach the coordinator when they change, before and after a step; the coordinator
    passes them on at once, or SNAPSHOT_S after it last did.
    """

    def __init__(self, workload: Workload, settings: Simulated, engines: Sequence[Engine]) -> None:
        from vllm.v1.engine.core_client import DPLBAsyncMPClient

        super().__init__(workload, settings, engines)
        self._vllm: Callable[[object, object], int] = DPLBAsyncMPClient.get_core_engine_for_request
        self._client = SimpleNamespace(
            core_engines=list(range(len(engines))),
            reqs_in_flight={},
            streaming_reqs=set(),
            engine_inflight=Counter(),
            client_count=1,
            client_index=0,
            eng_start_index=0,
            lb_engines=[[0, 0, 0.0] for _ in engines],
        )
        self._told = [(0, 0) for _ in engines]
        self._known: list[tuple[int, int, float]] = [(0, 0, 0.0) for _ in engines]  # by the coordinator
        self._news: list[tuple[float, int, int, tuple[int, int, float]]] = []  # a heap
        self._changed = False
        self._published_s = -SNAPSHOT_S
        self._reports = 0

    def choose(self, index: int, request: Request, at_s: float) -> int:
        self._publish(at_s)
        sent = SimpleNamespace(
            request_id=str(index), data_parallel_rank=None, pooling_params=None, resumable=False
        )
        try:
            return self._vllm(self._client, sent)
        except (AttributeError, TypeError) as error:
            raise KvtuneError(
                f"the simulator does not know this vLLM's data-parallel balancer: {error}",
                "choose another --router",
            ) from error

    def answered(self, index: int, replica: int) -> None:
        super().answered(index, replica)
        self._client.engine_inflight[self._client.reqs_in_flight.pop(str(index))] -= 1

    def looked(self, replica: int, at_s: float) -> None:
        counts = self.engines[replica].counts
        if counts[:2] != self._told[replica]:
            self._told[replica] = counts[:2]
            self._reports += 1
            heapq.heappush(self._news, (at_s, self._reports, replica, counts))

    def _publish(self, now_s: float) -> None:
        """Give vLLM's balancer what the coordinator has published by now."""
        while self._news and self._news[0][0] <= now_s:
            at_s, _, replica, counts = heapq.heappop(self._news)
            self._publish_if_due(at_s)
            self._known[replica] = counts
            self._changed = True
            if at_s - self._published_s >= SNAPSHOT_S:
                self._snapshot(at_s)
        self._publish_if_due(now_s)

    def _publish_if_due(self, now_s: float) -> None:
        if self._changed and self._published_s + SNAPSHOT_S <= now_s:
            self._snapshot(self._published_s + SNAPSHOT_S)

    def _snapshot(self, at_s: float) -> None:
        self._client.lb_engines = [list(counts) for counts in self._known]
        self._changed, self._published_s = False, at_s


class Prefix(Router):
    """Chooses the replica whose cache has most of a prompt; for a new one the least busy. Knows every cache."""

    def choose(self, index: int, request: Request, at_s: float) -> int:
        hits = [engine.cached(request) for engine in self.engines]
        best = max(hits)
        if best < NEW_SHARE * request.num_prompt_tokens:
            return self.least(range(len(hits)))
        return self.least([replica for replica, hit in enumerate(hits) if hit == best])


class Given(Router):
    """As the log, or a recorded run, says."""

    def choose(self, index: int, request: Request, at_s: float) -> int:
        return self.settings.routed[index]


KINDS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "session": Session,
    "least-busy": LeastBusy,
    "prefix": Prefix,
    GIVEN: Given,
}
