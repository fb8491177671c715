"""Hits of a cache of a given size: infinite, Belady's optimum, LRU, and two classes with a ghost list.

Pure functions of `Paths`: requests are served one after another, and hold their own nodes while they run. Each function
is exact for its policy, in a few steps per request and piece instead of per node. No vLLM.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from kvtune.reading.bounds.paths import Paths, Piece

GHOST_FACTOR = 4
"""Evicted hashes that the two-class policy remembers, as a multiple of the pool size."""


def infinite(paths: Paths) -> list[int]:
    """Return the tokens that each request hits in an infinite cache."""
    return [
        min(pieces[-1].high if pieces else 0, matchable) * paths.node_tokens
        for pieces, matchable in zip(paths.pieces, paths.matchable, strict=True)
    ]


def optimum(paths: Paths, capacity: int) -> list[int]:
    """Return the tokens that each request hits if the node whose next use is farthest away is evicted first.

    Of nodes with the same next user, the deepest is evicted first. So the nodes kept for a user are a prefix of its
    path, and one count per future request is the whole state. `capacity` in nodes.
    """
    uses: list[list[tuple[int, int]]] = [[] for _ in range(len(paths))]
    for request, pieces in enumerate(paths.pieces):
        for piece in pieces:
            uses[piece.last].append((request, piece.high - piece.low))
    kept = [0] * len(paths)
    farthest: list[int] = []  # heap of negated numbers of the requests for which nodes are kept
    total = 0
    hits = []
    for request, (nodes, matchable) in enumerate(zip(paths.nodes, paths.matchable, strict=True)):
        hits.append(min(kept[request], matchable) * paths.node_tokens)
        total -= kept[request]
        kept[request] = 0
        room = max(0, capacity - nodes)
        total = _keep_nearest(kept, farthest, total, room)
        for user, count in uses[request]:
            if not kept[user]:
                heapq.heappush(farthest, -user)
            kept[user] += count
            total += count
        if nodes > capacity:  # a request larger than the pool leaves a full pool
            total = _keep_nearest(kept, farthest, total, capacity)
    return hits


def _keep_nearest(kept: list[int], farthest: list[int], total: int, room: int) -> int:
    while total > room:
        user = -farthest[0]
        if not kept[user]:
            heapq.heappop(farthest)
            continue
        gone = min(kept[user], total - room)
        kept[user] -= gone
        total -= gone
    return total


def lru(paths: Paths, capacity: int) -> list[int]:
    """Return the tokens that each request hits with vLLM's LRU. Of nodes used at one time, the deepest goes first."""
    return two_class(paths, capacity, head_start_s=0.0, ghost=0)


def two_class(paths: Paths, capacity: int, *, head_start_s: float, ghost: int | None = None) -> list[int]:
    """Return the tokens that each request hits with two eviction queues: nodes used once, and nodes used again.

    A node counts as used again if it was in the cache, or among the last `ghost` evicted ones, when it was requested.
    The head of the second queue is evicted only when it is `head_start_s` older than the head of the first. 0 s is LRU;
    with infinity, nodes used again are evicted only if no others are left.
    """
    return _TwoClass(paths, capacity, head_start_s, GHOST_FACTOR * capacity if ghost is None else ghost).run()


class _TwoClass:
    """State per past request: `border` divides its path into nodes used again (shallow) and nodes used once (deep).

    Of the first part, [top, end_again) is in the cache; of the second, [max(top, border), end_once). Later users take
    nodes over from the top (`top` rises), eviction lowers the ends. `_head_again`, `_head_once`: the oldest request
    that still has nodes in that part.
    """

    def __init__(self, paths: Paths, capacity: int, head_start_s: float, ghost: int) -> None:
        n = len(paths)
        self._paths, self._capacity, self._head_start_s = paths, capacity, head_start_s
        self._top, self._border, self._end_again, self._end_once = [0] * n, [0] * n, [0] * n, [0] * n
        self._head_again = self._head_once = 0
        self._total = 0
        self._ghosts = _Ghosts(ghost)

    def run(self) -> list[int]:
        paths, capacity = self._paths, self._capacity
        top, border, end_again, end_once = self._top, self._border, self._end_again, self._end_once
        hits = []
        for request, (pieces, all_nodes) in enumerate(zip(paths.pieces, paths.nodes, strict=True)):
            nodes = min(all_nodes, capacity)
            hit, again = self._find(pieces) if pieces else (0, 0)
            for piece in pieces:  # this request becomes their last user
                last, low, high = piece
                self._total -= max(0, min(high, end_again[last]) - low) + max(
                    0, min(high, end_once[last]) - max(low, border[last])
                )
                top[last] = high
            if self._total > capacity - nodes:
                self._make_room(capacity - nodes, request)
            again = min(again, nodes)
            border[request] = end_again[request] = again
            end_once[request] = nodes
            self._total += nodes
            hits.append(min(hit, paths.matchable[request]) * paths.node_tokens)
        return hits

    def _find(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """Return how many nodes from the path's start are in the cache, and how many in the cache or the ghost list."""
        place = 0
        for last, low, high in pieces:
            if low != place:
                return place, place
            place = self._resident_until(last, low, high)
            if place < high:
                break
        hit = place
        for last, low, high in pieces:
            if high <= place:
                continue
            if low > place:
                break
            for ends, stop in ((self._end_again, min(high, self._border[last])), (self._end_once, high)):
                if place < stop:
                    place = max(place, min(stop, ends[last]))
                    place = (
                        self._ghosts.until(ends is self._end_again, last, place, stop)
                        if place < stop
                        else place
                    )
                    if place < stop:
                        return hit, place
        return hit, place

    def _resident_until(self, last: int, low: int, high: int) -> int:
        place, border = low, self._border[last]
        if place < border:
            place = max(place, min(high, self._end_again[last]))
            if place < border:
                return place
        return max(place, min(high, self._end_once[last]))

    def _make_room(self, room: int, served: int) -> None:
        top, border, end_again, end_once = self._top, self._border, self._end_again, self._end_once
        arrival, head_start_s = self._paths.arrival_s, self._head_start_s
        total, once, again = self._total, self._head_once, self._head_again
        while total > room:
            while once < served and end_once[once] <= max(border[once], top[once]):
                once += 1
            while again < served and end_again[again] <= top[again]:
                again += 1
            if again >= served:
                first = False
            elif once >= served:
                first = True
            elif head_start_s == 0:
                first = again < once
            else:
                first = arrival[once] - arrival[again] > head_start_s
            if first:
                end = end_again[again]
                gone = min(end - top[again], total - room)
                end_again[again] = end - gone
                self._ghosts.add(True, again, end - gone, end)
            else:
                end = end_once[once]
                gone = min(end - max(top[once], border[once]), total - room)
                end_once[once] = end - gone
                self._ghosts.add(False, once, end - gone, end)
            total -= gone
        self._total, self._head_once, self._head_again = total, once, again


class _Ghosts:
    """The ghost list: the last `size` evicted nodes. Each eviction takes the deepest nodes of a part of a path."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._evicted = 0
        # (used again?, request) -> its evictions: (number of nodes evicted before, low, high).
        self._of: dict[tuple[bool, int], list[tuple[int, int, int]]] = {}
        self._order: deque[tuple[int, bool, int]] = deque()

    def add(self, again: bool, request: int, low: int, high: int) -> None:
        if self._size:
            self._of.setdefault((again, request), []).append((self._evicted, low, high))
            self._order.append((self._evicted + high - low, again, request))
        self._evicted += high - low
        while self._order and self._order[0][0] < self._evicted - self._size:
            _, again, request = self._order.popleft()
            records = self._of[again, request]
            records.pop(0)
            if not records:
                del self._of[again, request]

    def until(self, again: bool, request: int, low: int, high: int) -> int:
        """Return the depth to which evicted nodes are remembered, from `low` on. The deepest are forgotten first."""
        oldest = self._evicted - self._size
        for before, first, last in reversed(self._of.get((again, request), ())):
            if low < first:
                break
            forgotten = max(0, oldest - before)  # of this eviction's nodes: the deepest ones are forgotten
            low = max(low, min(high, last - forgotten))
            if forgotten or low >= high:
                break
        return low


def hit_share(hits: Sequence[int], paths: Paths, since: int = 0) -> float:
    """Return hit tokens divided by prompt tokens, of the requests from number `since` on."""
    prompts = sum(paths.prompt_tokens[since:])
    return sum(hits[since:]) / prompts if prompts else 0.0
