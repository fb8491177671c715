"""Makes a stride's steps all at once, for mode `jump`. Hits and times are those of single steps; block ids differ.

Simulator's process only. Needs one full-attention group in stock's pool: there, decoding requests take blocks and
return no blocks, so the order in which they take blocks within a stride does not change which blocks are evicted.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from kvtune.core.steps.steady import Cohort
from kvtune.sim.fast.pace import Pace
from kvtune.sim.fast.steady_path import SteadyPath
from kvtune.vllm.types import GroupManager, Scheduler

SHORTEST = 2

Ints = NDArray[np.int64]


class Leaper:
    def __init__(self, scheduler: Scheduler, path: SteadyPath, group: GroupManager) -> None:
        self._path, self._group = path, group
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._size: int = group.block_size

    def run(self, cohort: Cohort, most: int, pace: Pace) -> tuple[array[float], array[int]] | None:
        """Take up to `most` steps. Return each step's end and free blocks; None if fewer than 2 steps are possible."""
        rows = cohort.rows
        count = len(rows)
        computed = np.fromiter((request.num_computed_tokens for request in rows.requests), np.int64, count)
        ends = pace.ends(count, int(computed.sum()), most)
        blocks = self._group.req_to_blocks
        held = np.fromiter((len(blocks[name]) for name in rows.ids), np.int64, count)
        steps = self._affordable(computed, held, len(ends))
        if steps < SHORTEST:
            return None
        free = self._pool.get_num_free_blocks()
        for i in (-(-(computed + steps) // self._size) > held).nonzero()[0].tolist():
            self._take(rows.ids[i], int(-(-(computed[i] + steps) // self._size) - held[i]))
        self._advance(cohort, steps)
        return ends[:steps], array("i", (free - self._taken(computed, held, steps)).astype("i4").tobytes())

    def _affordable(self, computed: Ints, held: Ints, steps: int) -> int:
        """Return the number of steps to take: `steps`, halved until the free blocks suffice; 0 for fewer than 2."""
        free = self._pool.get_num_free_blocks()
        while steps >= SHORTEST:
            needed = np.maximum(-(-(computed + steps) // self._size) - held, 0).sum()
            if needed <= free:
                return steps
            steps //= 2
        return 0

    def _taken(self, computed: Ints, held: Ints, steps: int) -> Ints:
        """Return how many blocks are taken by the end of each step. A request takes one when its blocks are full."""
        taken = np.zeros(steps, np.int64)
        at = held * self._size - computed
        while (now := at[at < steps]).size:
            taken += np.bincount(now, minlength=steps)
            at = now + self._size
        return taken.cumsum()

    def _take(self, name: str, blocks: int) -> None:
        self._group.req_to_blocks[name].extend(self._pool.get_new_blocks(blocks))

    def _advance(self, cohort: Cohort, steps: int) -> None:
        """Set the requests' counters, tokens, hashes and next events to their values after the steps."""
        rows = cohort.rows
        passed = (cohort.due <= cohort.scheduled + steps).nonzero()[0].tolist()
        tokens = [0] * steps
        for request, output, everything in zip(rows.requests, rows.outputs, rows.all_tokens, strict=True):
            request.num_computed_tokens += steps
            output.extend(tokens)
            everything.extend(tokens)
            if len(everything) // self._size > len(request.block_hashes):
                request.update_block_hashes()
        cohort.scheduled += steps
        cohort.updated += steps
        for i in passed:
            request = rows.requests[i]
            computed = request.num_computed_tokens
            self._manager.cache_blocks(request, computed - cohort.ahead)
            event = self._path.next_event(request, cohort.ahead)
            cohort.due[i] = cohort.scheduled + max(1, event - computed + 1)
