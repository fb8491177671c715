"""The columns that a replay fills while it runs; `record.py` makes the run's tables from them."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtune.lab.sim.steps import ExecutedStep
from kvtune.plugin.probe.offload import offload_watch
from kvtune.plugin.probe.pool import PoolWatch
from kvtune.plugin.probe.preempted import Preempted
from kvtune.plugin.probe.records import Copies
from kvtune.plugin.vllm.types import Scheduler

STEP_COLUMNS = (
    *("t_s", "end_s", "scheduled_tokens", "prefill_tokens", "requests", "running", "waiting", "free_blocks"),
    *("context_tokens", "prefill_context_tokens"),
)
"""What a row of `ReplayJournal.steps` has; counts are those after scheduling."""


class ReplayJournal:
    """Columns with a row per request (NaN or -1: not yet), per generated token, per step and per change of the pool."""

    def __init__(
        self,
        requests: int,
        scheduler: Scheduler,
        now_s: Callable[[], float],
        *,
        token_rows: bool,
        digests: bool,
    ) -> None:
        self.hits: NDArray[np.int64] = np.full(requests, -1, "i8")
        self.tier_hits: NDArray[np.int64] = np.zeros(requests, "i8")
        self.sent_s = np.full(requests, np.nan)
        self.first_s = np.full(requests, np.nan)
        self.finished_s = np.full(requests, np.nan)
        self.output: NDArray[np.int64] = np.zeros(requests, "i8")
        self.preemptions: NDArray[np.int32] = np.zeros(requests, "i4")
        self.keeps_tokens, self.keeps_digests = token_rows, digests
        self.token_request: array[int] = array("i")
        self.token_s: array[float] = array("d")
        self.steps: array[float] = array("d")
        """Rows of STEP_COLUMNS, one after the other."""
        self.digests: array[int] = array("L")
        self.pool: list[tuple[float, int, int, int]] = []
        """Rows: time in seconds, number of the eviction queue, evicted blocks, free blocks."""
        self.jumps = self.jumped_steps = 0
        self.preempted = Preempted(scheduler)
        self._watch = PoolWatch(scheduler.kv_cache_manager.block_pool)
        self.queues = self._watch.queues
        self._offload = offload_watch(scheduler.connector, lambda: round(now_s() * 1e9))
        self.copies: list[Copies] | None = None if self._offload is None else []
        """Copies to and from the tier of host memory; None without a tier."""

    def add_step(self, step: ExecutedStep, running: int, waiting: int, free_blocks: int) -> None:
        self.preempted.scheduled(step.scheduled)
        self.add_pool_changes(step.start_s, free_blocks)
        self.steps.extend(
            (
                *(step.start_s, step.end_s, step.prefill_tokens + step.decodes, step.prefill_tokens),
                *(step.requests, running, waiting, free_blocks),
                *(step.context_tokens, step.prefill_context_tokens),
            )
        )

    def add_steps(self, *columns: NDArray[np.float64] | NDArray[np.int64] | int) -> None:
        """Add rows of several steps. `columns`: in the order of STEP_COLUMNS; a number is that of every step."""
        rows = np.stack(np.broadcast_arrays(*columns), axis=1)
        self.steps.frombytes(rows.astype("f8").tobytes())

    def add_tokens(self, index: int, count: int, at_s: float) -> None:
        """Add a row for each token that a request got in one step."""
        self.token_request.extend([index] * count)
        self.token_s.extend([at_s] * count)

    def add_decoded(self, indexes: NDArray[np.int64], at_s: float) -> None:
        """Add a later token of each of these requests."""
        self.output[indexes] += 1
        if self.keeps_tokens:
            self.token_request.frombytes(indexes.astype("i4").tobytes())
            self.token_s.frombytes(np.full(len(indexes), at_s).tobytes())

    def add_pool_changes(self, start_s: float, free_blocks: int) -> None:
        """Add a row for each queue that lost blocks to the step that starts at `start_s`."""
        evicted = self._watch.news() or ()
        self.pool += [(start_s, queue, count, free_blocks) for queue, count in enumerate(evicted) if count]

    def add_evictions(
        self, starts: NDArray[np.float64], evicted: NDArray[np.int64], free: NDArray[np.int64]
    ) -> None:
        """Add a row for each step that took blocks from stock's one queue. `free`: the free blocks of each step."""
        if self._watch.news() is not None:
            self.pool += [
                (float(starts[step]), 0, int(evicted[step]), int(free[step])) for step in evicted.nonzero()[0]
            ]

    def add_copies(self, at_s: float) -> None:
        """Add a row for the tier's copies since the last call, if there were any."""
        if self._offload is not None and self.copies is not None:
            news = self._offload.news(round(at_s * 1e9))
            if news is not None:
                self.copies.append(news)
