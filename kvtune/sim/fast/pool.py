"""Stock's block pool with its loops over blocks inlined: a replay spends half of its time in them.

Simulator's process only, for pools of exactly vLLM's class. The decisions and every field of every block are stock's;
anything but the plain case (events, metrics, watchers, a block with several hashes) goes to stock's own methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvtune.core.vllm_types import KVCacheBlocks
from kvtune.sim.fast.steady_path import forget_limits, remembers_limits, replace_allocation
from kvtune.sim.vllm_types import Block, EngineRequest, EngineScheduler, GroupManager, Pool


class QuickPool(BlockPool):  # type: ignore[misc]
    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        if not self.enable_caching or self._unusual() or num_blocks > self.get_num_free_blocks():
            blocks: list[Block] = super().get_new_blocks(num_blocks)
            return blocks
        hashed = self.cached_block_hash_to_block
        cache = hashed._cache
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            key = block._block_hash
            if key is not None:
                if cache.get(key) is block:
                    del cache[key]
                else:
                    hashed.pop(key, block.block_id)
                block._block_hash = block._block_hash_num_tokens = None
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return blocks

    def cache_full_blocks(
        self,
        request: EngineRequest,
        blocks: list[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        if self._unusual() or block_size != self.hash_block_size:
            super().cache_full_blocks(
                request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
            )
            return
        cache = self.cached_block_hash_to_block._cache
        group = kv_cache_group_id.to_bytes(4, "big", signed=False)
        tokens = num_cached_blocks * block_size
        hashes = request.block_hashes[num_cached_blocks:num_full_blocks]
        new = blocks[num_cached_blocks:num_full_blocks]
        for block, block_hash, kept in zip(new, hashes, block_mask or repeat(True), strict=False):
            tokens += block_size
            if block.is_null or not kept:
                continue
            key = block_hash + group
            if block._block_hash is None and key not in cache:
                cache[key] = block
                block._block_hash, block._block_hash_num_tokens = key, tokens
            else:  # the same content twice, or a block that was hashed in part
                at = tokens // block_size
                super().cache_full_blocks(request, blocks, at - 1, at, block_size, kv_cache_group_id)

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        first: list[Block] = []
        last: list[Block] = []
        foreign: list[Block] = []
        for block in ordered_blocks:
            if block.is_null:
                continue  # its count says nothing, and later versions keep none
            if block.pool is not self:
                foreign.append(block)
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (first if block._block_hash is None or not self.enable_caching else last).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)
        if foreign:
            super().free_blocks(foreign)

    def _unusual(self) -> bool:
        """Whether anything but the map and the queue has to hear of changes."""
        return bool(
            self.enable_kv_cache_events
            or self.metrics_collector
            or self._reuse_watchers
            or self.cached_block_hashes_by_block
            # A listener has replaced the map's methods: they have to be called.
            or len(self.cached_block_hash_to_block.__dict__) > 1
        )


def adopt(pool: Pool) -> None:
    """Give a pool of exactly vLLM's class the loops above; others stay as they are."""
    if type(pool) is BlockPool:
        pool.__class__ = QuickPool


def lone_group(scheduler: EngineScheduler) -> GroupManager | None:
    """The manager of the one full-attention group that lives in a QuickPool; None for any other engine."""
    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    if (
        len(groups) != 1
        or type(groups[0]) is not FullAttentionManager
        or type(manager.block_pool) is not QuickPool
    ):
        return None
    group = groups[0]
    plain = not group._record_new_block_ids and group.block_size == scheduler.hash_block_size
    return group if plain and remembers_limits(manager) else None


def adopt_events(scheduler: EngineScheduler) -> None:
    """Give the steady path a shorter allocation for its events, where `lone_group` has a group."""
    group = lone_group(scheduler)
    if group is None:
        return
    manager, size = scheduler.kv_cache_manager, group.block_size
    pool, blocks_of, cached_of = manager.block_pool, group.req_to_blocks, group.num_cached_block

    def allocate(request: EngineRequest) -> KVCacheBlocks:
        name = request.request_id
        forget_limits(manager, name)
        blocks, upto = blocks_of[name], request.num_computed_tokens + 1
        new = pool.get_new_blocks(1) if upto > len(blocks) * size else []
        blocks.extend(new)
        upto = min(upto, request.num_tokens)
        if upto // size > cached_of.get(name, 0):
            manager.cache_blocks(request, upto)
        return manager.create_kv_cache_blocks((new,))

    replace_allocation(scheduler, allocate)
