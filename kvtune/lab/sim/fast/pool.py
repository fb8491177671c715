"""Gives stock's groups inlined loops over blocks, and its pool runs of blocks (`runs.py`).

Simulator's process only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any, NamedTuple, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvtune.lab.sim.chains import BlockHashes
from kvtune.lab.sim.fast.runs import Hit, RunPool
from kvtune.plugin.core.cache.quick import QuickPool
from kvtune.plugin.vllm import types
from kvtune.plugin.vllm.types import (
    KVCacheBlock,
    KVCacheManager,
    KVCacheSpec,
    has_several_specs,
)

Found = tuple[tuple[list[KVCacheBlock], ...], int]
"""The cached blocks of each group, and how many tokens they hold."""


class Lookup(NamedTuple):
    """What vLLM asks of a manager's `find_longest_cache_hit`."""

    block_hashes: Sequence[bytes]
    max_length: int
    kv_cache_group_ids: list[int]
    block_pool: types.BlockPool
    kv_cache_spec: KVCacheSpec
    drop_eagle_block: bool
    alignment_tokens: int
    dcp_world_size: int = 1
    pcp_world_size: int = 1


class QuickGroup(FullAttentionManager):  # type: ignore[misc]
    """vLLM's manager of a group of full attention, with an inlined search for a prompt's cached blocks."""

    @classmethod
    def find_longest_cache_hit(cls, **asked: Any) -> Found:
        lookup = Lookup(**asked)
        hashes, pool, size = lookup.block_hashes, lookup.block_pool, lookup.kv_cache_spec.block_size
        if (
            not isinstance(hashes, BlockHashes)
            or not _is_quick(pool, size)
            or lookup.alignment_tokens < size
            or lookup.dcp_world_size > 1
        ):
            if isinstance(pool, RunPool):
                pool.dissolve()
            return super().find_longest_cache_hit(**asked)  # type: ignore[no-any-return]
        count = min(lookup.max_length // size, len(hashes))
        groups: list[list[KVCacheBlock]] = []
        for group in lookup.kv_cache_group_ids:
            keys = hashes.chain.keys(group)
            if isinstance(pool, RunPool) and group in pool.groups:
                groups.append(pool.find(keys, count))
            else:
                groups.append(_cached(pool, islice(keys, count)))
            count = len(groups[-1])
        tokens = count * size
        if lookup.drop_eagle_block and tokens:
            tokens -= size
        tokens -= tokens % lookup.alignment_tokens
        for blocks in groups:
            del blocks[-(-tokens // size) :]
        return tuple(groups), tokens

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *tokens: int
    ) -> None:
        if type(new_computed_blocks) is Hit:
            new_computed_blocks.holder = self.kv_cache_group_id, request_id
        super().add_local_computed_blocks(request_id, new_computed_blocks, *tokens)

    def free(self, request_id: str) -> None:
        pool, blocks = self.block_pool, self.pop_blocks_for_free(request_id)
        if isinstance(pool, RunPool):
            pool.free_held((self.kv_cache_group_id, request_id), blocks)
        else:
            pool.free_blocks(reversed(blocks))

    @classmethod
    def _get_num_evictable_blocks(cls, blocks: Sequence[KVCacheBlock]) -> int:
        if type(blocks) is Hit:
            return blocks.evictable()
        # None of them is the null block, whose reference count means nothing.
        return [block.ref_cnt for block in blocks].count(0)


class QuickWindow(SlidingWindowManager):  # type: ignore[misc]
    """vLLM's manager of a group of sliding windows, with an inlined search."""

    @classmethod
    def find_longest_cache_hit(cls, **asked: Any) -> Found:
        hashes, max_length, groups, pool, spec, drops, alignment, *_ = Lookup(**asked)
        size = spec.block_size
        if not isinstance(spec, SlidingWindowSpec) or not _is_quick(pool, size) or alignment % size:
            return super().find_longest_cache_hit(**asked)  # type: ignore[no-any-return]
        need = max(1, cls._contiguous_blocks_for_hit(spec.sliding_window, size, drops))
        every, dropped = alignment // size, int(drops)
        cached = pool.cached_block_hash_to_block._cache
        suffixes = [group.to_bytes(4, "big") for group in groups]
        first, others = suffixes[0], suffixes[1:]
        run, index = 0, max_length // size
        while index and run < need:
            index -= 1
            block_hash = hashes[index]
            if block_hash + first not in cached or any(block_hash + other not in cached for other in others):
                run = 0
            elif run or (index + 1 - dropped) % every == 0:
                run += 1
        count = index + run
        if run < need:  # the run that begins the prompt counts, however short
            count -= count % every
        if dropped and count:
            count -= 1
            count -= count % every
        hits = []
        for suffix in suffixes:
            keys = (block_hash + suffix for block_hash in hashes[index:count])
            hits.append([pool.null_block] * min(index, count) + _cached(pool, keys))
        return tuple(hits), count * size

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        """Free these blocks, the last first, up to one that was freed before."""
        blocks, null = self.req_to_blocks.get(request_id, []), self._null_block
        freed = []
        for index in range(min(last_block, len(blocks)) - 1, first_block - 1, -1):
            if blocks[index] is null:
                break
            freed.append(blocks[index])
            blocks[index] = null
        if freed:
            self.block_pool.free_blocks(freed)

    def free(self, request_id: str) -> None:
        """Free the blocks after the null blocks of what the window has left, the last first."""
        blocks, null = self.pop_blocks_for_free(request_id), self._null_block
        self.block_pool.free_blocks(takewhile(lambda block: block is not null, reversed(blocks)))


def _is_quick(pool: types.BlockPool, block_size: int) -> bool:
    """Whether blocks are found by whole keys in the pool's map, with nothing that has to be called."""
    return (
        isinstance(pool, QuickPool)
        and "get_cached_block" not in vars(pool)
        and pool.hash_block_size == block_size
    )


def _cached(pool: types.BlockPool, keys: Iterable[bytes]) -> list[KVCacheBlock]:
    """Return the cached blocks of the keys up to the first key that has none."""
    blocks: list[KVCacheBlock | dict[int, KVCacheBlock]] = []
    with suppress(KeyError):  # what came before the error stays in the list
        blocks.extend(map(pool.cached_block_hash_to_block._cache.__getitem__, keys))
    if dict in set(map(type, blocks)):
        # Of several blocks with one hash vLLM takes the first.
        return [next(iter(block.values())) if isinstance(block, dict) else block for block in blocks]
    return cast(list[KVCacheBlock], blocks)


QUICK: dict[type, type] = {FullAttentionManager: QuickGroup, SlidingWindowManager: QuickWindow}


def adopt(manager: KVCacheManager) -> None:
    """Turn a pool and its groups' managers into quick ones, those that are exactly of vLLM's classes."""
    pool, coordinator = manager.block_pool, manager.coordinator
    for group in coordinator.single_type_managers:
        group.__class__ = QUICK.get(type(group), type(group))
    if type(pool) is BlockPool:
        pool.__class__ = RunPool
        groups = [group for group in coordinator.single_type_managers if type(group) is QuickGroup]
        cast(RunPool, pool).adopt_runs(
            group.kv_cache_group_id
            for group in groups
            if manager.enable_caching and _is_quick(pool, group.block_size)
        )
    if has_several_specs(coordinator):
        coordinator.attention_groups = [
            spec._replace(manager_cls=QUICK.get(spec.manager_cls, spec.manager_cls))
            for spec in coordinator.attention_groups
        ]
