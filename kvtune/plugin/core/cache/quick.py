"""vLLM's block pool with its loops over blocks inlined. Base of the core's pool in EngineCore; the simulator's pool.

Used only with a vLLM whose pool is the one that these loops were written for (`kvtune/plugin/vllm`). Decisions and
all fields of all blocks are the same as vLLM's. Special cases (events, metrics, watchers, a block with several
hashes) go to vLLM's own methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Filled(NamedTuple):
    """What vLLM asks a pool to hash: a request's full blocks after the cached ones, those in the mask."""

    request: Request
    blocks: list[KVCacheBlock]
    num_cached_blocks: int
    num_full_blocks: int
    block_size: int
    kv_cache_group_id: int
    block_mask: list[bool] | None = None


class QuickPool(BlockPool):  # type: ignore[misc]
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if not self.enable_caching or self.unusual() or num_blocks > self.get_num_free_blocks():
            return BlockPool.get_new_blocks(self, num_blocks)  # type: ignore[no-any-return]
        hashed = self.cached_block_hash_to_block
        cache = hashed._cache
        blocks: list[KVCacheBlock] = self.free_block_queue.popleft_n(num_blocks)
        gone: list[KVCacheBlock] = []
        keys: list[bytes] = []
        for block in blocks:
            key = block._block_hash
            if key is not None:
                if cache.get(key) is block:
                    del cache[key]
                    gone.append(block)
                    keys.append(key)
                elif hashed.pop(key, block.block_id) is not None:
                    gone.append(block)
                    keys.append(key)
                block._block_hash = block._block_hash_num_tokens = None
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        if gone:
            self.tell_evicted(gone, keys)
        return blocks

    def cache_full_blocks(self, *args: Any, **named: Any) -> None:
        filled = Filled(*args, **named)
        request, blocks, num_cached_blocks, num_full_blocks, block_size, group_id, block_mask = filled
        if self.unusual() or block_size != self.hash_block_size:
            BlockPool.cache_full_blocks(self, *filled)
            return
        cache = self.cached_block_hash_to_block._cache
        group = group_id.to_bytes(4, "big", signed=False)
        tokens = num_cached_blocks * block_size
        hashes = request.block_hashes[num_cached_blocks:num_full_blocks]
        new = blocks[num_cached_blocks:num_full_blocks]
        stored: list[KVCacheBlock] = []
        keys: list[bytes] = []
        for block, block_hash, kept in zip(new, hashes, block_mask or repeat(True), strict=False):
            tokens += block_size
            if block.is_null or not kept:
                continue
            key = block_hash + group
            if block._block_hash is None and key not in cache:
                cache[key] = block
                block._block_hash, block._block_hash_num_tokens = key, tokens
                stored.append(block)
                keys.append(key)
                continue
            # The same content twice, or a block that was hashed in part.
            if stored:
                self.tell_stored(stored, keys)
                stored, keys = [], []
            number = tokens // block_size
            BlockPool.cache_full_blocks(self, request, blocks, number - 1, number, block_size, group_id)
        if stored:
            self.tell_stored(stored, keys)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        first: list[KVCacheBlock] = []
        last: list[KVCacheBlock] = []
        foreign: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue  # the null block's reference count has no meaning, and later versions of vLLM do not keep one
            if block.pool is not self:
                foreign.append(block)
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (first if block._block_hash is None or not self.enable_caching else last).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)
        if foreign:
            BlockPool.free_blocks(self, foreign)

    def unusual(self) -> bool:
        """Whether changes concern more than the hash map and the free queue: events, metrics, watchers, listeners."""
        return bool(
            self.enable_kv_cache_events
            or self.metrics_collector
            or self._reuse_watchers
            or self.cached_block_hashes_by_block
            # A listener has replaced the map's methods: they have to be called.
            or len(self.cached_block_hash_to_block.__dict__) > 1
        )

    def tell_evicted(self, blocks: list[KVCacheBlock], keys: list[bytes]) -> None:
        """Called when these blocks have lost their hashes; does nothing here."""

    def tell_stored(self, blocks: list[KVCacheBlock], keys: list[bytes]) -> None:
        """Called when these blocks have got hashes that no other block has; does nothing here."""
