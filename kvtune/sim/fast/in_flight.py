"""The batch that asynchronous scheduling has in flight: a stride begins and ends with one. Simulator's process only."""

from __future__ import annotations

from kvtune.core.steps.steady import Cohort
from kvtune.sim.engine_types import EngineCore


class InFlight:
    """The batch queue of one engine, which must schedule asynchronously, as strides use it."""

    def __init__(self, engine: EngineCore) -> None:
        assert engine.batch_queue is not None
        self._queue = engine.batch_queue

    @property
    def end_s(self) -> float:
        return self._queue[0][0].end_s

    def decodes(self, cohort: Cohort) -> bool:
        """Whether exactly one batch is in flight, and it computes one token of each row of the cohort."""
        return len(self._queue) == 1 and self._queue[0][1].num_scheduled_tokens == cohort.rows.one_each

    def becomes_last(self, end_s: float) -> None:
        """Let the batch in flight, for which `decodes` holds, stand for a later one of the same rows."""
        self._queue[0][0].end_s = end_s
