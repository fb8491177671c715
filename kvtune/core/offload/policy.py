"""Which chunks a tier of host memory stores and evicts, by reuse. A cache policy behind vLLM's own hook; EngineCore.

    a chunk is stored       if it came back after its eviction or refusal, if a quarter of its request's prompt is
                            known (a conversation goes on), if its request is one of SAMPLED, or while there is room
    chunks are in two ages  used once, and reused: hit, or come back
    evicted is              the oldest that was used once, unless the oldest reused one is older by two tiers of uses

`duel.py` turns it to plain age, in which all is stored, when that would have hit more; it starts so.
What vLLM's hook does not allow: storing a chunk when the pool evicts it. A store reads the blocks of a request that
runs or has just ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from kvtune.core.offload.duel import Duel
from kvtune.core.policies.remembered import Remembered, mark

GHOST = 4
"""Chunks that are remembered after their eviction or refusal, in tier sizes: 13 bytes each."""
LIVE = 0.25
"""Share of a request's chunks that must be known for all of them to be stored."""
SAMPLED = 8
"""Of the requests whose prompts are new, one in so many is stored."""
LEFT, LOST_TO_AGE = 0, 1
"""Of a chunk that is remembered: refused, or evicted by reuse; evicted in the order of age."""
BONUS = 2
"""Uses of chunks, in tier sizes, by which a reused one outlives others."""


@dataclass(slots=True)
class Asked:
    """What one request has asked the tier for. Kept in vLLM's context of the request."""

    keys: list[bytes] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    loaded: set[bytes] = field(default_factory=set)
    sampled: bool | None = None
    first_miss: int = 0
    """Tokens up to the end of the first chunk that the pool did not have; 0: it had them all."""
    group: bytes = b""
    last: int = 0
    ended: bool = False


class ReusePolicy(CachePolicy):  # type: ignore[misc]
    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.duel = Duel(cache_capacity)
        self.refused = 0
        self.new_requests = 0
        self.clear()

    def clear(self) -> None:
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._once: OrderedDict[bytes, int] = OrderedDict()  # key -> clock of its last use, oldest first
        self._reused: OrderedDict[bytes, int] = OrderedDict()
        self._clock = 0
        self._kept_by_age: set[bytes] = set()
        self._came_back: set[bytes] = set()  # of the offer that is being stored
        self._ghost = Remembered(GHOST * self.cache_capacity, lambda kind, epoch: None)
        self.duel.clear()

    # What the manager tells.

    def admit(self, keys: Sequence[bytes], context: Any) -> list[bytes]:
        """The chunks of an offer that are stored, or are in the tier already."""
        asked = asked_of(context)
        chunks = self._chunks
        new = [key for key in keys if key not in chunks]
        left = {key: found for key in new if (found := self._ghost.take(mark(key))) is not None}
        came_back = self._came_back = set(left)
        asked.known.update(came_back, (key for key in keys if key in chunks))
        asked.keys += keys
        if self.duel.by_age:
            self.duel.asked_again(sum(kind == LOST_TO_AGE for kind, _ in left.values()), 0)
        if not new:
            return list(keys)
        live = len(asked.known) >= LIVE * len(asked.keys)
        if not live and asked.sampled is None:
            self.new_requests += 1
            asked.sampled = self.new_requests % SAMPLED == 0
        room = self.cache_capacity - len(chunks)
        if live or asked.sampled or len(new) <= room:
            return list(keys)
        refused = [key for key in new if key not in came_back]
        if self.duel.by_age:
            self._kept_by_age.update(refused)
            return list(keys)
        refused = refused[room:]
        for key in refused:
            self._ghost.add(mark(key), LEFT, 0)
        self.refused += len(refused)
        out = set(refused)
        return [key for key in keys if key not in out]

    def looked_up(self, key: bytes, hit: bool, context: Any) -> None:
        """Each attempt to admit a request looks up what the pool does not have of it, from there to the first miss."""
        asked = asked_of(context)
        asked.group = asked.group or key[-4:]
        if key[-4:] == asked.group:
            end_token = context.get_offload_key_position(key) or 0
            if asked.ended or end_token <= asked.last or not asked.first_miss:
                asked.first_miss = end_token
            asked.last, asked.ended = end_token, not hit

    def loads(self, keys: Iterable[bytes], context: Any) -> None:
        asked = asked_of(context)
        keys = list(keys)
        asked.loaded.update(keys)
        asked.known.update(keys)
        asked.keys += keys
        kept = self._kept_by_age.intersection(keys)
        self._kept_by_age -= kept
        self.duel.asked_again(0, len(kept))

    # CachePolicy.

    def get(self, key: bytes) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(
        self, key: bytes, chunk: ChunkStatus, req_context: Any = None
    ) -> None:  # vLLM before 0.33: no context
        self._chunks[key] = chunk
        self._clock += 1
        (self._reused if key in self._came_back else self._once)[key] = self._clock

    def remove(self, key: bytes) -> None:
        del self._chunks[key]
        if self._once.pop(key, None) is None:
            del self._reused[key]
        self._kept_by_age.discard(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        for key in reversed(list(keys)):
            self._use(key, False)

    def _use(self, key: bytes, reused: bool) -> None:
        if key not in self._chunks:
            return
        self._clock += 1
        if reused and self._once.pop(key, None) is not None:
            self._kept_by_age.discard(key)
        ages = self._once if key in self._once else self._reused
        ages[key] = self._clock
        ages.move_to_end(key)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """`admit` has seen them."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        asked = req_context.get_state(Asked)
        if asked is None:
            return
        keys = order_request_keys([list(dict.fromkeys(asked.keys))], req_context)
        position = req_context.get_offload_key_position
        in_pool = len(keys)
        if asked.first_miss:
            in_pool = sum((position(key) or 0) < asked.first_miss for key in keys)
        self.duel.settle(keys, in_pool, asked.loaded)
        for key in reversed(keys):
            self._use(key, key in asked.known)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        once, reused = self._idle(self._once, protected), self._idle(self._reused, protected)
        bonus = 0 if self.duel.by_age else BONUS * self.cache_capacity
        single, again = next(once, None), next(reused, None)
        chosen: list[bytes] = []
        while len(chosen) < n:
            if single is not None and (again is None or single[1] <= again[1] + bonus):
                chosen.append(single[0])
                single = next(once, None)
            elif again is not None:
                chosen.append(again[0])
                again = next(reused, None)
            else:
                return None
        evicted = [(key, self._chunks[key]) for key in chosen]
        kind = LOST_TO_AGE if self.duel.by_age else LEFT
        for key in chosen:
            self._ghost.add(mark(key), kind, 0)
            self.remove(key)
        return evicted

    def _idle(self, ages: OrderedDict[bytes, int], protected: set[bytes]) -> Iterator[tuple[bytes, int]]:
        """Chunks that nobody copies, oldest first."""
        chunks = self._chunks
        return ((k, used) for k, used in ages.items() if k not in protected and chunks[k].ref_cnt == 0)

    def counters(self) -> dict[str, int]:
        return {"tier_refused": self.refused, "tier_turns_to_reuse": self.duel.turns}

    def violations(self) -> list[str]:
        """What is wrong with the tier's own lists, one line each (KVTUNE_AUDIT)."""
        problems = []
        ages = [*self._once, *self._reused]
        if len(ages) != len(set(ages)) or self._chunks.keys() != set(ages):
            problems.append(f"{len(self._chunks)} chunks of the tier are in {len(ages)} places by age")
        if len({chunk.chunk_id for chunk in self._chunks.values()}) != len(self._chunks):
            problems.append("two keys of the tier have one chunk")
        if len(self._chunks) > self.cache_capacity:
            problems.append(f"{len(self._chunks)} chunks in a tier of {self.cache_capacity}")
        return problems


def asked_of(context: Any) -> Asked:
    asked = context.get_state(Asked)
    if asked is None:
        asked = Asked()
        context.set_state(asked)
    return asked  # type: ignore[no-any-return]
