"""Steppers: each advances the simulated engine its own way, by one step or by many at once.

The player asks them in order; the first whose `try_step` gives a result has made the step. `EngineStepper`, which lets
vLLM make the step, always does and comes last. The others are in `fast/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtune.sim.engine_types import EngineCore
from kvtune.vllm.types import BlockIds, NewRequestData, Outputs, ScheduledStep


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """One batch as the executor ran it. `decodes` counts requests, `context_tokens` the KV tokens they attend to."""

    start_s: float
    end_s: float
    prefill_tokens: int
    requests: int
    decodes: int
    context_tokens: int
    prefill_context_tokens: int
    scheduled: ScheduledStep


@dataclass(slots=True)
class DecodedRows:
    """Rows of a step that was made without a SchedulerOutput, as `digest` reads them."""

    new_block_ids: Sequence[BlockIds | None]
    num_computed_tokens: Sequence[int]


@dataclass(slots=True)
class BulkStep:
    """A step that was made without a SchedulerOutput: what `digest` reads of it."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Sequence[NewRequestData]
    scheduled_cached_reqs: DecodedRows


@dataclass(frozen=True, slots=True)
class StepResult:
    """`outputs`: tokens that the journal does not have yet. `executed`: the model ran (or would have run)."""

    outputs: Outputs | None
    executed: bool


JOURNALED = StepResult(None, True)
"""The result of steps that a stepper has written to the journal itself."""


class Stepper(Protocol):
    def try_step(self) -> StepResult | None:
        """Advance the engine by at least one step. None, with nothing changed, if this stepper does not apply."""


class EngineStepper:
    """One step of vLLM's own EngineCore."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    def try_step(self) -> StepResult:
        outputs, executed = self._engine.step_fn()
        self._engine.post_step(executed)
        return StepResult(outputs, executed)
