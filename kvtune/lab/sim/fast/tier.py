"""Gives vLLM's tier of host memory bulk loops over a request's chunks. Simulator's process only.

vLLM's connector offers a prompt's chunks to the tier whether it has them or not, and what it offers is used again when
the request ends, chunk by chunk; most are there already, and only their order matters. Here the chunks of an LRU stand
in that order, and those of a request are looked up and moved at once. Stores, loads, evictions are vLLM's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from itertools import groupby, islice, takewhile
from operator import itemgetter, truth

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.kv_offload.base import PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from kvtune.lab.sim.chains import BlockHashes, with_group
from kvtune.plugin.vllm.types import Key

GROUP: Callable[[Key], bytes] = itemgetter(slice(-4, None))
"""The bytes of a key that name its group."""


class QuickLru(LRUCachePolicy):  # type: ignore[misc]
    """vLLM's LRU with its chunks in the order of their use, so that none needs a rank.

    A chunk is evictable while no copy reads or writes it. `kept`: what a store must not evict.
    """

    chunks: OrderedDict[Key, ChunkStatus]
    kept: Collection[Key] = ()

    def insert(self, key: Key, chunk: ChunkStatus) -> None:
        self.chunks[key] = chunk

    def _update_recency(self, keys: Iterable[Key]) -> None:
        deque(map(self.chunks.move_to_end, filter(self.chunks.__contains__, keys)), 0)

    def evict(self, n: int, protected: set[Key]) -> list[tuple[Key, ChunkStatus]] | None:
        kept = set(self.kept)
        free = (each for each in self.chunks.items() if each[1].ref_cnt == 0 and each[0] not in kept)
        evicted = list(islice(free, n))
        if len(evicted) < n:
            return None
        for key, _ in evicted:
            del self.chunks[key]
        return evicted

    def mark_evictable(self, key: Key) -> None:
        """Do nothing: `evict` asks the chunk."""

    mark_non_evictable = mark_evictable


class QuickManager(CPUOffloadingManager):  # type: ignore[misc]
    """vLLM's manager with an LRU, which ignores which of the chunks that a request used were new."""

    _policy: QuickLru

    def _record_request_cache_access(
        self, keys: Iterable[Key], req_context: ReqContext, *_: object, **__: object
    ) -> None:
        state = self._get_request_cache_access(req_context)
        new = [key for key in keys if key not in state.seen_keys]
        state.seen_keys.update(new)
        for group, some in groupby(new, GROUP):
            state.key_groups.setdefault(int.from_bytes(group, "big"), []).extend(some)

    def prepare_store(self, keys: Collection[Key], req_context: ReqContext) -> PrepareStoreOutput | None:
        keys, chunks = list(keys), self._policy.chunks
        # What is still being written counts as used when it is offered again.
        kept = [key for key in keys if (chunk := chunks.get(key)) is None or chunk.ref_cnt >= 0]
        self._record_request_cache_access(kept, req_context)
        self._policy.kept = keys
        return super().prepare_store([key for key in kept if key not in chunks], req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._get_request_cache_access(req_context)
        if state.finished:
            return
        state.finished = True
        keys = [key for _, some in sorted(state.key_groups.items()) for key in some]
        keys.sort(key=req_context._offload_key_positions.__getitem__)
        self._policy._update_recency(reversed(keys))


def update_offload_keys(status: RequestOffloadState) -> None:
    """Add the keys of a request's new hashes, and where in the prompt they end."""
    hashes, positions = status.req.block_hashes, status.req_context._offload_key_positions
    for config, state in zip(status.config.kv_group_configs, status.group_states, strict=True):
        keys, every, size = state.offload_keys, config.hashes_per_chunk, config.tokens_per_chunk
        which = slice(every * (len(keys) + 1) - 1, len(hashes), every)
        if isinstance(hashes, BlockHashes):
            new = hashes.chain.keys(config.group_idx)[which]
        else:
            new = with_group(hashes[which], config.group_idx)
        ends = range(size * (len(keys) + 1), size * (len(keys) + len(new) + 1), size)
        positions.update(zip(new, ends, strict=True))
        keys += new


KEYS = RequestOffloadState, "update_offload_keys", update_offload_keys


class QuickSide(OffloadingConnectorScheduler):  # type: ignore[misc]
    """vLLM's connector in the scheduler's role, on a QuickManager and without events that describe chunks."""

    def _maximal_prefix_lookup(self, keys: Iterable[Key], *_: object) -> int | None:
        readers = [chunk.ref_cnt for chunk in takewhile(truth, map(self.manager._policy.chunks.get, keys))]
        return None if -1 in readers else len(readers)

    def get_external_cache_hit_sources(self, *_: object) -> None:
        """Return nothing: a statistic for clients, which would sort the places of all loaded chunks."""


def adopt(side: OffloadingConnectorScheduler) -> None:
    """Turn a connector, its manager and its LRU into quick ones, if they are exactly vLLM's; others stay."""
    manager = side.manager
    if (
        type(side) is not OffloadingConnectorScheduler
        or type(manager) is not CPUOffloadingManager
        or type(manager._policy) is not LRUCachePolicy
        or manager.counts is not None
        or side._events_tracker.self_describing_enabled
    ):
        return
    policy = manager._policy
    policy.__class__ = QuickLru
    policy.chunks = OrderedDict(policy.chunks)
    policy.get = policy.chunks.get
    manager.__class__, side.__class__ = QuickManager, QuickSide
