"""A stride's steps all at once, for jump and coarse modes: hits and times of single steps, other block ids.

Simulator's process only. Only where one full-attention group lives in stock's pool: requests that decode take blocks
and give none back, so within a stride it does not matter in which order they take them; what is evicted is the same.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from kvtune.core.steps.steady import next_event

SHORTEST = 2


class Leaper:
    def __init__(self, scheduler: Any, group: Any, cost: Any) -> None:
        self._scheduler, self._group, self._cost = scheduler, group, cost
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._size = group.block_size

    def run(
        self, cohort: Any, most: int, at: float, due: float | None
    ) -> tuple[array[float], array[int]] | None:
        """Ends of the steps taken and free blocks in each; None where there are too few that are alike."""
        rows = cohort.rows
        count = len(rows)
        computed = np.fromiter((request.num_computed_tokens for request in rows.requests), np.int64, count)
        ends = self._ends(count, int(computed.sum()), most, at, due)
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

    def _ends(self, count: int, context: int, most: int, at: float, due: float | None) -> array[float]:
        """The ends of the single steps, added up as they are; the last one starts before a request may arrive."""
        seconds, ends = self._cost.seconds, array("d")
        for _ in range(most):
            if due is not None and due <= at:
                break
            at += seconds(0, count, context)
            context += count
            ends.append(at)
        return ends

    def _affordable(self, computed: Any, held: Any, steps: int) -> int:
        """As many steps as there are free blocks for, found by halving."""
        free = self._pool.get_num_free_blocks()
        while steps >= SHORTEST:
            needed = np.maximum(-(-(computed + steps) // self._size) - held, 0).sum()
            if needed <= free:
                return steps
            steps //= 2
        return 0

    def _taken(self, computed: Any, held: Any, steps: int) -> Any:
        """Blocks taken up to and in each step: one where a request's computed tokens fill those that it holds."""
        taken = np.zeros(steps, np.int64)
        at = held * self._size - computed
        while (now := at[at < steps]).size:
            taken += np.bincount(now, minlength=steps)
            at = now + self._size
        return taken.cumsum()

    def _take(self, name: str, blocks: int) -> None:
        self._group.req_to_blocks[name].extend(self._pool.get_new_blocks(blocks))

    def _advance(self, cohort: Any, steps: int) -> None:
        """Counters, tokens, hashes and next events as after the steps."""
        scheduler, manager, rows = self._scheduler, self._manager, cohort.rows
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
            manager.cache_blocks(request, computed)
            manager.noop_limits.pop(request.request_id, None)
            event = next_event(request, scheduler.steady_limits(request), 0, scheduler.max_model_len)
            cohort.due[i] = cohort.scheduled + max(1, event - computed + 1)
