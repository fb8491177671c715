"""Steppers: each advances the simulated engine in a different way, by one step or by many at once.

The player calls `try_step` of each in order until one returns a result. `EngineStepper`, which lets vLLM make the step,
comes last and always returns a result. The other steppers are in `fast/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtune.lab.sim.engine_types import EngineCore
from kvtune.plugin.vllm.types import BlockIds, NewRequestData, Outputs, ScheduledStep


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """One batch as the executor ran it. `context_tokens`: KV tokens that its requests had before the step."""

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
    """The requests of a `BulkStep`, one row each, with the fields that `digest` reads."""

    new_block_ids: Sequence[BlockIds | None]
    num_computed_tokens: Sequence[int]


@dataclass(slots=True)
class BulkStep:
    """Replaces the SchedulerOutput of a step that was made without vLLM's scheduler, with the fields `digest` reads."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Sequence[NewRequestData]
    scheduled_cached_reqs: DecodedRows


@dataclass(frozen=True, slots=True)
class Hidden:
    """The rows that a step decodes beside what its SchedulerOutput names (fast/scheduler.py).

    `version`: of their columns. `context`: KV tokens that they had before the step. `whole`: what `digest` reads.
    """

    version: int
    names: list[str]
    indexes: NDArray[np.int64]
    context: int
    whole: BulkStep | None


def hidden_of(step: object) -> Hidden | None:
    """Return the rows that a SchedulerOutput does not name."""
    hidden: Hidden | None = getattr(step, "hidden", None)
    return hidden


@dataclass(frozen=True, slots=True)
class Decoded:
    """The requests, in their order, that got a token without an output; the first `with_output` outputs are theirs."""

    indexes: NDArray[np.int64]
    with_output: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """`outputs`: tokens that are not in the journal yet. `executed`: whether the model ran (or would have run)."""

    outputs: Outputs | None
    executed: bool
    decoded: Decoded | None = None


JOURNALED = StepResult(None, True)
"""The result of a stepper that has written its steps to the journal itself."""


class Stepper(Protocol):
    def try_step(self) -> StepResult | None:
        """Advance the engine by at least one step; or change nothing and return None if this stepper does not apply."""


class EngineStepper:
    """Makes one step with vLLM's own EngineCore."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    def try_step(self) -> StepResult:
        outputs, executed = self._engine.step_fn()
        self._engine.post_step(executed)
        return StepResult(outputs, executed)
