"""Gives stock's block pool inlined loops over blocks, in which a replay spends half of its time.

Simulator's process only. The class is the core's `QuickPool` (`kvtune/core/cache/quick.py`), with stock's one queue.
"""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvtune.core.cache.quick import QuickPool
from kvtune.sim.fast.steady_path import forget_limits, remembers_limits, replace_allocation
from kvtune.vllm import types
from kvtune.vllm.types import GroupManager, KVCacheBlocks, Request, Scheduler


def adopt(pool: types.BlockPool) -> None:
    """Turn a pool of exactly vLLM's class into a QuickPool; leave any other pool unchanged."""
    if type(pool) is BlockPool:
        pool.__class__ = QuickPool


def lone_group(scheduler: Scheduler) -> GroupManager | None:
    """Return the manager if the engine has one KV cache group, with full attention, in a QuickPool; else None."""
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
