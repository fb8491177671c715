"""Which chunks a tier of host memory stores and evicts, by reuse. A cache policy behind vLLM's own hook; EngineCore.

    a chunk is stored       if it came back after its eviction or refusal, if a quarter of its request's prompt is
                            known (a conversation goes on), if its request is one of SAMPLED, or while there is room
    chunks are in two ages  used once, and reused: hit, or come back
    evicted is              the oldest that was used once, unless the oldest reused one is older by two tiers of uses
    spare windows           are stored while there is room, and evicted before all others (`windows.py`)

`duel.py` turns it to plain age, in which all is stored, when that would have hit more; it starts so.
What vLLM's hook does not allow: storing a chunk when the pool evicts it. A store reads the blocks of a request that
runs or has just ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from kvtune.core.offload.duel import Duel
from kvtune.core.offload.windows import Windows
from kvtune.core.policies.remembered import Remembered

GHOST = 4
"""Chunks that are remembered after their eviction or refusal, in tier sizes: 11 bytes each."""
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
    reached: int = 0
    """Tokens up to the end of the last chunk that the tier had, in the group that is looked up first."""
    group: bytes = b""
    last: int = 0
    ended: bool = False


class ReusePolicy(CachePolicy):  # type: ignore[misc]
    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.duel = Duel(cache_capacity)
        self.windows: Windows | None = None
        """Set where every window is offered."""
        self.refused = 0
        self.new_requests = 0
        self.clear()

    def clear(self) -> None:
        self.chunks: dict[bytes, ChunkStatus] = {}
        self._once: OrderedDict[bytes, int] = OrderedDict()  # key -> clock of its last use, oldest first
        self._reused: OrderedDict[bytes, int] = OrderedDict()
        self._spare: OrderedDict[bytes, int] = OrderedDict()
        self._clock = 0
        self._kept_by_age: set[bytes] = set()
        self._came_back: set[bytes] = set()  # of the offer that is being stored
        self._new_spare: set[bytes] = set()  # of the same
        self._ghost = Remembered(GHOST * self.cache_capacity)
        self.duel.clear()

    # What the manager tells.

    def admit(self, keys: Sequence[bytes], context: Any) -> list[bytes]:
        """The chunks of an offer that are stored, or are in the tier already."""
        asked = asked_of(context)
        self._new_spare = set()
        windows = self.windows
        spare = windows.spare(keys, context, asked.reached) if windows is not None else None
        if not spare:
            return self._admit(keys, asked)
        apart, chunks = set(spare), self.chunks
        admitted = set(self._admit([key for key in keys if key not in apart], asked))
        new = [key for key in spare if key not in chunks]
        room = self._room() - sum(key not in chunks for key in admitted)
        self._new_spare = set(new[-room:] if room > 0 else ())
        apart = apart.difference(new) | self._new_spare
        return [key for key in keys if key in admitted or key in apart]

    def _room(self) -> int:
        """Chunks that can be stored before any is evicted that somebody may need."""
        return int(self.cache_capacity) - len(self.chunks) + len(self._spare)

    def _admit(self, keys: Sequence[bytes], asked: Asked) -> list[bytes]:
        chunks = self.chunks
        self._needed(keys)
        new = [key for key in keys if key not in chunks]
        left = self._ghost.take_all(new)
        came_back = self._came_back = set(left)
        asked.known.update(came_back, (key for key in keys if key in chunks))
        asked.keys += keys
        if self.duel.by_age:
            self.duel.asked_again(sum(kind == LOST_TO_AGE for kind in left.values()), 0)
        if not new:
            return list(keys)
        live = len(asked.known) >= LIVE * len(asked.keys)
        if not live and asked.sampled is None:
            self.new_requests += 1
            asked.sampled = self.new_requests % SAMPLED == 0
        room = self._room()
        if live or asked.sampled or len(new) <= room:
            return list(keys)
        refused = [key for key in new if key not in came_back]
        if self.duel.by_age:
            self._kept_by_age.update(refused)
            return list(keys)
        refused = refused[room:]
        self._ghost.add_all(refused, LEFT)
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
            if hit:
                asked.reached = end_token

    def loads(self, keys: Iterable[bytes], context: Any) -> None:
        asked = asked_of(context)
        keys = list(keys)
        asked.loaded.update(keys)
        asked.known.update(keys)
        asked.keys += keys
        self._needed(keys)
        kept = self._kept_by_age.intersection(keys)
        self._kept_by_age -= kept
        self.duel.asked_again(0, len(kept))

    # CachePolicy.

    def get(self, key: bytes) -> ChunkStatus | None:
        return self.chunks.get(key)

    def insert(
        self, key: bytes, chunk: ChunkStatus, req_context: Any = None
    ) -> None:  # vLLM before 0.33: no context
        self.chunks[key] = chunk
        self._clock += 1
        if key in self._new_spare:
            self._spare[key] = self._clock
        else:
            (self._reused if key in self._came_back else self._once)[key] = self._clock

    def remove(self, key: bytes) -> None:
        del self.chunks[key]
        if self._once.pop(key, None) is None and self._spare.pop(key, None) is None:
            del self._reused[key]
        self._kept_by_age.discard(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._use_all(reversed(list(keys)), ())

    def _needed(self, keys: Iterable[bytes]) -> None:
        """Spare ones among these chunks are of use from now on."""
        spare = self._spare
        for key in [key for key in keys if key in spare] if spare else ():
            del spare[key]
            self._clock += 1
            self._once[key] = self._clock

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
        keys = list(dict.fromkeys(asked.keys))
        ends = list(map(req_context.get_offload_key_position, keys))
        if None in ends or ends != sorted(ends):
            keys = order_request_keys([keys], req_context)
            ends = sorted(req_context.get_offload_key_position(key) or 0 for key in keys)
        in_pool = bisect_left(ends, asked.first_miss) if asked.first_miss else len(keys)
        self.duel.settle(keys, in_pool, asked.loaded)
        self._use_all(reversed(keys), asked.known)

    def _use_all(self, keys: Iterable[bytes], known: Collection[bytes]) -> None:
        """They are the newest now, and those that were known are reused."""
        chunks, once, reused = self.chunks, self._once, self._reused
        for key in keys:
            if key not in chunks:
                continue
            self._clock += 1
            if key in once:
                if key in known:
                    del once[key]
                    self._kept_by_age.discard(key)
                    reused[key] = self._clock
                else:
                    once[key] = self._clock
                    once.move_to_end(key)
            else:
                ages = self._spare if key in self._spare else reused
                ages[key] = self._clock
                ages.move_to_end(key)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        once, reused = self._idle(self._once, protected), self._idle(self._reused, protected)
        bonus = 0 if self.duel.by_age else BONUS * self.cache_capacity
        single, again = next(once, None), next(reused, None)
        chosen = [key for key, _ in islice(self._idle(self._spare, protected), n)]
        spare = len(chosen)
        while len(chosen) < n:
            if single is not None and (again is None or single[1] <= again[1] + bonus):
                chosen.append(single[0])
                single = next(once, None)
            elif again is not None:
                chosen.append(again[0])
                again = next(reused, None)
            else:
                return None
        evicted = [(key, self.chunks[key]) for key in chosen]
        kind = LOST_TO_AGE if self.duel.by_age else LEFT
        self._ghost.add_all(chosen[spare:], kind)
        for key in chosen:
            self.remove(key)
        return evicted

    def _idle(self, ages: OrderedDict[bytes, int], protected: set[bytes]) -> Iterator[tuple[bytes, int]]:
        """Chunks that nobody copies, oldest first."""
        chunks = self.chunks
        return ((k, used) for k, used in ages.items() if k not in protected and chunks[k].ref_cnt == 0)

    def counters(self) -> dict[str, int]:
        return {"tier_refused": self.refused, "tier_turns_to_reuse": self.duel.turns}

    def violations(self) -> list[str]:
        """What is wrong with the tier's own lists, one line each (KVTUNE_AUDIT)."""
        problems = []
        ages = [*self._once, *self._reused, *self._spare]
        if len(ages) != len(set(ages)) or self.chunks.keys() != set(ages):
            problems.append(f"{len(self.chunks)} chunks of the tier are in {len(ages)} places by age")
        if len({chunk.chunk_id for chunk in self.chunks.values()}) != len(self.chunks):
            problems.append("two keys of the tier have one chunk")
        if len(self.chunks) > self.cache_capacity:
            problems.append(f"{len(self.chunks)} chunks in a tier of {self.cache_capacity}")
        return problems


def asked_of(context: Any) -> Asked:
    asked = context.get_state(Asked)
    if asked is None:
        asked = Asked()
        context.set_state(asked)
    return asked  # type: ignore[no-any-return]
