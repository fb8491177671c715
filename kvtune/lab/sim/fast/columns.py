"""Requests that decode, as rows of columns, and the blocks that they take and fill. Simulator's process only.

A request that decodes takes a token in each step and needs nothing else until it fills a block, a window moves or its
answer ends. Rows are counted; the fields of vLLM's `Request` lag behind until `scheduler.py` settles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvtune.lab.sim.chains import BlockHashes
from kvtune.lab.sim.fast.runs import RunPool
from kvtune.plugin.vllm.types import BlockPool, GroupManager, KVCacheBlock, Request

Ints = NDArray[np.int64]

TOKENS, LAST, SLOTS, CACHED, DUE, INDEX = range(6)
"""Columns: tokens known, tokens at the end, tokens that fit its blocks, tokens at which a block is next cached, tokens
at which the row next needs more than to be counted, and the request's position in the workload."""


class Columns:
    """The rows, in the order of `running`. `ahead`: tokens of each that are in flight between two steps.

    `version` changes when rows leave otherwise than by their end. From `schedule` to `update_from_output`, `earlier` is
    how many rows were there before: those that have joined since are as vLLM left them; `scheduled` says which rows
    take a token in the step.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead, self.version = ahead, 0
        self.clear()

    def clear(self) -> None:
        self.version += 1
        self.earlier: int | None = None
        self.scheduled: NDArray[np.bool_] | None = None
        self.requests: list[Request] = []
        self.names: list[str] = []
        self.table: Ints = np.empty((6, 0), np.int64)

    def join(self, requests: Sequence[Request], rows: Sequence[Sequence[int]]) -> None:
        self.requests = [*self.requests, *requests]
        self.names = [*self.names, *(request.request_id for request in requests)]
        self.table = np.concatenate((self.table, np.array(rows, np.int64).T), axis=1)

    def drop(self, ended: Sequence[int]) -> None:
        self.requests, self.names = self.requests.copy(), self.names.copy()
        for i in reversed(ended):
            del self.requests[i], self.names[i]
        self.table = np.delete(self.table, ended, axis=1)

    def going_on(self) -> NDArray[np.bool_]:
        """Return which rows take a token in the next step: with async scheduling, the last may be in flight."""
        mask: NDArray[np.bool_] = self.table[TOKENS] + self.ahead < self.table[LAST]
        return mask

    def computed(self) -> Ints:
        """Return how many tokens of each row have been scheduled before the next step."""
        counts: Ints = self.table[TOKENS] + (self.ahead - 1)
        return counts


@dataclass(frozen=True, slots=True)
class Dealt:
    """Blocks in the order in which they were taken, one of each group for a row of a step. `evicted`: by step."""

    rows: list[int]
    blocks: list[KVCacheBlock]
    evicted: Ints
    free: Ints


class Dealer:
    """Deals where the order of blocks taken, returned and cached does not matter.

    It does not if no block is returned, enough are free, and no block of the pool or of these rows has the hash of
    another.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[GroupManager]) -> None:
        """`groups`: those of an engine with nothing but `QuickGroup`s; none if nothing can be dealt."""
        self._pool, self._groups = pool, groups

    def deal(self, columns: Columns, steps: int, going_on: NDArray[np.bool_] | None = None) -> Dealt | None:
        """Deal the next `steps`, in which all rows take tokens (or those going on); None where the order matters."""
        pool, table, groups = self._pool, columns.table, self._groups
        if not groups or not isinstance(pool, RunPool) or pool.unusual():
            return None
        size, width = pool.hash_block_size, len(groups)
        full = (table[TOKENS] + (steps - 1)) // size
        fills = full * size >= table[CACHED]
        first_steps = table[SLOTS] - columns.computed()  # in which a row needs a block
        counts = np.maximum(-((first_steps - steps) // size), 0)
        if going_on is not None:
            fills &= going_on
            counts *= going_on
        if width * counts.sum() > pool.get_num_free_blocks():
            return None
        filling = fills.nonzero()[0]
        firsts, ends = (table[CACHED, filling] // size - 1).tolist(), full[filling].tolist()
        keys: list[bytes] = []
        for i, first, end in zip(filling.tolist(), firsts, ends, strict=True):
            hashes = columns.requests[i].block_hashes
            if type(hashes) is not BlockHashes:
                return None
            for group in groups:
                keys += hashes.chain.keys(group.kv_cache_group_id)[first:end]
        if not pool.are_new(keys):
            return None
        row = np.arange(len(counts)).repeat(counts)
        step = (first_steps - size * (counts.cumsum() - counts)).repeat(counts) + size * np.arange(len(row))
        order = np.lexsort((row, step))
        step, rows = step[order], row[order].tolist()
        free = pool.get_num_free_blocks() - width * np.bincount(step, minlength=steps).cumsum()
        hashed = np.array(pool.are_hashed(width * len(rows)), bool)
        blocks = pool.get_new_blocks(width * len(rows))
        names, taken = columns.names, iter(keys)
        for number, group in enumerate(groups):
            held = group.req_to_blocks
            for i, block in zip(rows, blocks[number::width], strict=True):
                held[names[i]].append(block)
        for i, first, end in zip(filling.tolist(), firsts, ends, strict=True):
            for group in groups:
                new = group.req_to_blocks[names[i]][first:end]
                holder = group.kv_cache_group_id, names[i]
                pool.cache_new(holder, first, new, [*islice(taken, end - first)])
                group.num_cached_block[names[i]] = end
        table[SLOTS] += size * counts
        table[CACHED, filling] = (full[filling] + 1) * size
        table[DUE] = np.minimum(table[SLOTS] + (1 - columns.ahead), table[CACHED])
        evicted = np.bincount(step.repeat(width)[hashed], minlength=steps)
        return Dealt(rows, blocks, evicted, free)
