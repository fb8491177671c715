"""vLLM's LRU of a tier of host memory, with a list in the place of its heap. Simulator's process only.

vLLM 0.32 ranks a chunk when it is inserted and when a request that used it ends, and evicts the lowest rank that nobody
copies. A dict that moves what gets a new rank to its end keeps that order by itself. From 0.33 on the chunks of one
request share a rank while it runs, and the last of them goes first: no dict keeps that order, so vLLM's heap stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from kvtune.core.compat.names import ranks_chunks_by_request


class OrderedLru(CachePolicy):  # type: ignore[misc]
    """LRUCachePolicy, to whoever calls it."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: OrderedDict[bytes, ChunkStatus] = OrderedDict()

    def get(self, key: bytes) -> ChunkStatus | None:
        return self.chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: Any = None) -> None:
        self.chunks[key] = chunk

    def insert_all(self, keys: Sequence[bytes], chunks: Iterable[ChunkStatus]) -> None:
        """`insert` for each of them."""
        self.chunks.update(zip(keys, chunks, strict=True))

    def remove(self, key: bytes) -> None:
        del self.chunks[key]

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._used(reversed(list(keys)))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        self._used(reversed(order_request_keys(key_groups, req_context)))

    def _used(self, keys: Iterable[bytes]) -> None:
        chunks = self.chunks
        for key in keys:
            if key in chunks:
                chunks.move_to_end(key)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        chosen = []
        if n:
            for key, chunk in self.chunks.items():
                if chunk.ref_cnt == 0 and key not in protected:
                    chosen.append((key, chunk))
                    if len(chosen) == n:
                        break
            else:
                return None
        for key, _ in chosen:
            del self.chunks[key]
        return chosen

    def clear(self) -> None:
        self.chunks.clear()


def adopt(connector: Any) -> None:
    """Exchange the policy of a connector that has just been built, where it is vLLM's LRU."""
    manager: Any = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    policy: Any = getattr(manager, "_policy", None)
    if type(policy) is LRUCachePolicy and not policy.chunks and not ranks_chunks_by_request(policy):
        manager._policy = OrderedLru(policy.cache_capacity)
