"""Gives stock's block pool and its group inlined loops over blocks, in which a replay spends most of its time.

Simulator's process only. The pool's class is the core's `QuickPool` (`kvtune/core/cache/quick.py`), with stock's one
queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvtune.core.cache.quick import QuickPool
from kvtune.sim.fast.steady_path import forget_limits, remembers_limits, replace_allocation
from kvtune.vllm import types
from kvtune.vllm.types import (
    GroupManager,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheManager,
    KVCacheSpec,
    Request,
    Scheduler,
)


class QuickGroup(FullAttentionManager):  # type: ignore[misc]
    """vLLM's manager of one group of full attention, with an inlined search for a prompt's cached blocks."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: types.BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        size = kv_cache_spec.block_size
        if (
            not isinstance(block_pool, QuickPool)
            or "get_cached_block" in vars(block_pool)
            or not size == block_pool.hash_block_size == alignment_tokens
            or len(kv_cache_group_ids) > 1
            or drop_eagle_block
            or dcp_world_size > 1
        ):
            stocks: tuple[tuple[list[KVCacheBlock], ...], int] = super().find_longest_cache_hit(
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                dcp_world_size,
                pcp_world_size,
            )
            return stocks
        group = kv_cache_group_ids[0].to_bytes(4, "big", signed=False)
        cached = block_pool.cached_block_hash_to_block._cache.get
        found: list[KVCacheBlock] = []
        for block_hash in islice(block_hashes, max_length // size):
            block = cached(block_hash + group)
            if block is None:
                break
            # Of several blocks with one hash vLLM takes the first.
            found.append(next(iter(block.values())) if type(block) is dict else block)
        return (found,), len(found) * size


def adopt(manager: KVCacheManager) -> None:
    """Turn a pool and the manager of a lone group into quick ones, if they are exactly of vLLM's classes."""
    pool, groups = manager.block_pool, manager.coordinator.single_type_managers
    if type(pool) is BlockPool:
        pool.__class__ = QuickPool
    if len(groups) == 1 and type(groups[0]) is FullAttentionManager:
        groups[0].__class__ = QuickGroup


def lone_group(scheduler: Scheduler) -> GroupManager | None:
    """Return the manager if the engine has one KV cache group, with full attention, in a QuickPool; else None."""
    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not QuickGroup or type(manager.block_pool) is not QuickPool:
        return None
    group = groups[0]
    plain = not group._record_new_block_ids and group.block_size == scheduler.hash_block_size
    return group if plain and remembers_limits(manager) else None


def adopt_events(scheduler: Scheduler) -> None:
    """Give the steady-decode path a faster block allocation, if the engine has a `lone_group`."""
    group = lone_group(scheduler)
    if group is None:
        return
    manager, size = scheduler.kv_cache_manager, group.block_size
    pool, blocks_of, cached_of = manager.block_pool, group.req_to_blocks, group.num_cached_block

    def allocate(request: Request) -> KVCacheBlocks:
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
