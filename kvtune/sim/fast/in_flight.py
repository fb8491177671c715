"""The batch in flight at the begin and end of a stride, with asynchronous scheduling. Simulator's process only."""

from __future__ import annotations

from kvtune.core.steps.steady import Cohort
from kvtune.sim.engine_types import EngineCore


class InFlight:
    """The batch queue of an engine with asynchronous scheduling, as strides use it."""

    def __init__(self, engine: EngineCore) -> None:
        assert engine.batch_queue is not None
        self._queue = engine.batch_queue

    @property
    def end_s(self) -> float:
        return self._queue[0][0].end_s

    def decodes(self, cohort: Cohort) -> bool:
        """Whether exactly one batch is in flight, and that batch decodes one token of each request of the cohort."""
        return len(self._queue) == 1 and self._queue[0][1].num_scheduled_tokens == cohort.rows.one_each

    def becomes_last(self, end_s: float) -> None:
        """Move the end of the batch in flight to `end_s`, so that it stands for the stride's last batch."""
        self._queue[0][0].end_s = end_s
