"""The batch that an engine with asynchronous scheduling has in flight between two turns. Simulator's process only.

A turn of vLLM's `step_with_batch_queue` schedules batch N, then waits for batch N - 1 and updates its requests. So one
batch is always in flight, and whoever makes the next turn updates it.

    scheduled by         its rows                                   updated by
    vLLM, steady path    in its SchedulerOutput                     `scheduler.update_from_output`
    mixed.py             some set aside, others in the output       mixed.py; vLLM once `complete` has put all in
    a stride             the batch before it, which then stands for the stride's last batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.outputs import ModelRunnerOutput

from kvtune.core.steps.steady import Cohort, Rows
from kvtune.sim.vllm_types import EngineCore, ModelOutput, PendingOutput, SchedulerOutput


@dataclass(slots=True)
class Aside:
    """Rows of the batch in flight that are not in its SchedulerOutput. `cohort` counts the batch as scheduled."""

    output: SchedulerOutput
    cohort: Cohort
    rows: Rows


class InFlight:
    """The batch queue of one engine, which must schedule asynchronously, as the fast steppers use it."""

    def __init__(self, engine: EngineCore) -> None:
        assert engine.batch_queue is not None
        self._queue = engine.batch_queue
        self._aside: Aside | None = None

    @property
    def one(self) -> bool:
        """Whether exactly one batch is in flight, as between two turns of a busy engine."""
        return len(self._queue) == 1

    @property
    def end_s(self) -> float:
        return self._queue[0][0].end_s

    def launch(
        self, future: PendingOutput, aside: Aside
    ) -> tuple[PendingOutput, SchedulerOutput, Aside | None]:
        """Queue a new batch behind the one in flight, and take that one out."""
        before, self._aside = self._aside, aside
        self._queue.appendleft((future, aside.output, future))
        done, output, _ = self._queue.pop()
        return done, output, before

    def decodes(self, cohort: Cohort) -> bool:
        """Whether the batch in flight is one token of each row of the cohort."""
        if not self.one:
            return False
        aside = self._aside
        if aside is not None and aside.cohort is not cohort:
            self.complete()
            aside = None
        scheduled = self._queue[0][1].num_scheduled_tokens
        if aside is None:
            return scheduled == cohort.rows.one_each
        if not scheduled:
            return aside.rows is cohort.rows or aside.rows.ids == cohort.rows.ids
        return {**aside.rows.one_each, **scheduled} == cohort.rows.one_each

    def becomes_last_of(self, cohort: Cohort, end_s: float) -> None:
        """The batch in flight, for which `decodes` holds, stands for a later one of the same rows."""
        future, output, _ = self._queue[0]
        future.end_s = end_s
        if self._aside is not None:
            self._aside.rows = cohort.rows
            output.num_scheduled_tokens = {}
            output.total_num_scheduled_tokens = 0
            future.value = with_rows(cohort.rows, (), output, None)

    def complete(self) -> None:
        """Put the rows that are set aside into the batch: whoever makes the next turn, vLLM updates all of it."""
        aside = self._aside
        if aside is None:
            return
        self._aside = None
        future, output, _ = self._queue[0]
        future.value = with_rows(aside.rows, range(len(aside.rows)), output, future.value)
        # The batch no longer counts as the cohort's; its clock is that of the updates after this one.
        aside.cohort.updated += 1


def with_rows(
    rows: Rows, chosen: Sequence[int], output: SchedulerOutput, result: ModelOutput | None
) -> ModelOutput:
    """The model's output with the chosen rows in front, as the engine orders them; `output` has them added."""
    ids = [rows.ids[i] for i in chosen]
    output.num_scheduled_tokens = {**dict.fromkeys(ids, 1), **output.num_scheduled_tokens}
    output.total_num_scheduled_tokens += len(ids)
    names = ids + (result.req_ids if result is not None else [])
    both: ModelOutput = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[0] for _ in ids] + (result.sampled_token_ids if result is not None else []),
        kv_connector_output=None if result is None else result.kv_connector_output,
    )
    return both
