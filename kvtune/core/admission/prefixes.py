"""Finds the waiting request with most of its prompt in the cache, at a bounded cost. Runs in EngineCore.

For each ranked request it keeps how many of its leading blocks the first full-attention group holds. The number grows
when the next block is stored: the request is filed under that block's hash. Evictions are noticed when the request
reaches the top, by vLLM's own lookup, which changes nothing. So the number is too low only while LOOKS is used up.

| event | cost |
|---|---|
| a block is stored | one dict lookup |
| a request arrives, or the block after its cached ones is stored | its newly cached blocks, once |
| `best` is called | at most LOOKS of those blocks, and TRIES of vLLM's lookups, usually one |
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from kvtune.core.vllm_types import BlockMap, KVCacheBlock, KVCacheManager, Request

LOOKS = 1024
"""Blocks that one call checks at most."""
LOOKS_PER_PLACE = 16
"""What a request costs of LOOKS, beside its blocks."""
TRIES = 8
"""vLLM's own lookups in one call, at most."""


class Place:
    """One request's place in the queue."""

    __slots__ = ("fixed", "gone", "key", "length", "number", "request", "step")

    def __init__(self, request: Request, number: int, step: int, fixed: bool) -> None:
        self.request = request
        self.number = number  # the number of its arrival
        self.step = step  # the scheduler's step when it arrived
        self.fixed = fixed  # in stock's order: it overtakes no request, and none overtakes it
        self.gone = False  # admitted, skipped, or aborted
        self.length = 0  # cached blocks
        self.key: bytes | None = None  # the hash of the block that would be the next cached one


class Prefixes:
    """Ranks places by cached tokens, then by arrival."""

    def __init__(self, manager: KVCacheManager, group_id: int, block_tokens: int) -> None:
        self._manager, self._coordinator, self._pool = manager, manager.coordinator, manager.block_pool
        self._group = group_id.to_bytes(4, "big", signed=False)
        self._tokens = block_tokens
        self._several = len(self._coordinator.single_type_managers) > 1
        self._places: dict[int, Place] = {}
        self._map: BlockMap | None = None
        self._cached: Mapping[bytes, object] = {}  # the map's blocks, by hash
        self._failed: Exception | None = None
        self._forget()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, place: Place) -> None:
        self._places[place.number] = place
        self._grown.append(place)

    def remove(self, place: Place) -> None:
        place.gone = True
        if self._places.pop(place.number, None) is not None:
            self._unfile(place)

    def lead(self) -> Place | None:
        """The place with most cached blocks by the numbers kept here; None when all have none."""
        self._catch_up()
        return self._top()

    def _top(self) -> Place | None:
        ranked = self._ranked
        while ranked:
            less, _, place = ranked[0]
            if not place.gone and place.length == -less:
                return place
            heapq.heappop(ranked)
        return None

    def best(self) -> Place | None:
        """The place with most cached blocks by vLLM's own lookup; None when all have none."""
        self._catch_up()
        if self._doubtful:
            self._look_up(self._doubtful.pop(next(iter(self._doubtful))))
        seen: dict[int, Place] = {}
        while (place := self._top()) is not None:
            if place.number in seen:
                return place
            if len(seen) == TRIES:
                return min(seen.values(), key=_rank) if any(one.length for one in seen.values()) else None
            known = place.length
            if self._look_up(place) >= known:
                return place
            seen[place.number] = place
        return None

    def stored(self, key: bytes) -> None:
        """A block with this hash was stored: requests filed under it may have one more cached block."""
        filed = self._filed.pop(key, None)
        if filed:
            for place in filed.values():
                place.key = None
            self._grown.extend(filed.values())

    def _catch_up(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._pool.cached_block_hash_to_block is not self._map:
            self._listen()
        self._walk()

    def _forget(self) -> None:
        self._ranked: list[tuple[int, int, Place]] = []
        self._filed: dict[bytes, dict[int, Place]] = {}
        self._doubtful: dict[int, Place] = {}
        self._last: tuple[bytes, int] = (b"", 0)
        self._grown: deque[Place] = deque(self._places.values())

    def _listen(self) -> None:
        """Start over with the pool's map of hashes: it is the first one, or a reset has made a new one."""
        self._map = cached = self._pool.cached_block_hash_to_block
        self._cached = cached._cache
        insert = cached.insert
        for place in self._places.values():
            place.length, place.key = 0, None
        self._forget()
        filed = self._filed

        def insert_and_notify(key: bytes, block: KVCacheBlock) -> None:
            insert(key, block)
            if key in filed:
                try:
                    self.stored(key)
                except Exception as error:
                    self._failed = error  # raised at the next call of ours, not in the pool

        cached.insert = insert_and_notify

    def _walk(self) -> None:
        """Count further cached blocks of requests that may have more, as far as LOOKS goes."""
        cache, group, grown = self._cached, self._group, self._grown
        left = LOOKS
        while grown and left > 0:
            place = grown.popleft()
            if place.gone:
                continue
            hashes, limit = place.request.block_hashes, self._limit(place.request)
            known = at = place.length
            last, upto = self._last
            if at < upto <= limit and hashes[upto - 1] == last:
                # Hashes are chained: an equal hash here means equal blocks up to here.
                at = upto
            end = min(limit, at + left)
            left -= LOOKS_PER_PLACE
            while at < end and hashes[at] + group in cache:
                at += 1
                left -= 1
            if at > known:
                self._last = (hashes[at - 1], at)
                self._rank(place, at)
            if at == end < limit:
                grown.appendleft(place)  # LOOKS is used up
                return
            self._file(place, at)

    def _look_up(self, place: Place) -> int:
        """Set a place's length by vLLM's own lookup, which covers all groups."""
        request = place.request
        hit = self._coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        length = min(int(hit[1]) // self._tokens, self._limit(request))
        if length != place.length:
            self._last = (b"", 0)
            self._rank(place, length)
        self._file(place, length)
        return length

    def _limit(self, request: Request) -> int:
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        return min(len(request.block_hashes), int(request.num_tokens - 1) // self._tokens)

    def _rank(self, place: Place, length: int) -> None:
        place.length = length
        if length:
            heapq.heappush(self._ranked, (-length, place.number, place))
        if len(self._ranked) > 2 * len(self._places) + 64:
            self._ranked = [(-one.length, n, one) for n, one in self._places.items() if one.length]
            heapq.heapify(self._ranked)

    def _file(self, place: Place, at: int) -> None:
        """File a place under the hash of its block `at`. If that is cached, another group ended the hit: recheck."""
        self._unfile(place)
        request = place.request
        if at >= self._limit(request):
            return
        key = request.block_hashes[at] + self._group
        if self._several and key in self._cached:
            self._doubtful[place.number] = place
            return
        place.key = key
        self._filed.setdefault(key, {})[place.number] = place

    def _unfile(self, place: Place) -> None:
        self._doubtful.pop(place.number, None)
        if place.key is not None:
            filed = self._filed.get(place.key)
            if filed is not None:
                filed.pop(place.number, None)
                if not filed:
                    del self._filed[place.key]
            place.key = None


def _rank(place: Place) -> tuple[int, int]:
    return -place.length, place.number
