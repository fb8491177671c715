"""Strides while requests wait for blocks, in an engine with asynchronous scheduling. Simulator's process only.

As in a jump (`jump.py`): where the first waiting request did not fit into a step that only decoded, it will not fit
before blocks are given back. One full-attention group gives none back while all decode; otherwise a stride ends before
the next event.
"""

from __future__ import annotations

from typing import Protocol

from kvtune.core.steps.steady import Cohort
from kvtune.sim.fast.jump import FULL_ATTENTION
from kvtune.sim.fast.steady_path import SteadyPath
from kvtune.sim.fast.stride import LONGEST, StrideStepper
from kvtune.sim.steps import EngineStepper, StepResult
from kvtune.sim.vllm_types import EngineCore


class Jumper(Protocol):
    """A stepper that takes steps at once while requests wait for blocks."""

    @property
    def blocked(self) -> bool:
        """The first waiting request does not fit, and no other will be tried before a running one ends."""

    def note_blocked(self, blocked: bool) -> None:
        """`blocked`: the last step only decoded and admitted no waiting request."""


class BlockedStepper:
    """Makes one step of the engine, or a stride where the last step left the waiting requests waiting."""

    def __init__(self, engine: EngineCore, path: SteadyPath, strider: StrideStepper) -> None:
        self._scheduler, self._path, self._strider = engine.scheduler, path, strider
        self._engine_step = EngineStepper(engine)
        groups = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        self._only_takes = len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ in FULL_ATTENTION
        self.blocked = False

    def try_step(self) -> StepResult | None:
        scheduler = self._scheduler
        if not scheduler.waiting:
            self.blocked = False
            return None
        cohort = self._path.all_running()
        if cohort is not None and self.blocked:
            result = self._strider.stride(cohort, self._until_event(cohort))
            if result is not None:
                return result
        before = (len(scheduler.running), len(scheduler.waiting))
        result = self._engine_step.try_step()
        after = (len(scheduler.running), len(scheduler.waiting))
        # A step that only decodes has tokens left for a waiting request; none was admitted for lack of blocks.
        self.note_blocked(cohort is not None and after == before)
        return result

    def note_blocked(self, blocked: bool) -> None:
        self.blocked = blocked

    def _until_event(self, cohort: Cohort) -> int:
        """The most steps in which no group gives back a block."""
        return LONGEST if self._only_takes else int(cohort.due.min()) - cohort.scheduled - 1
