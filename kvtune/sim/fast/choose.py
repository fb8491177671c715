"""Which steppers a replay gets, in the order in which they are asked. Chosen once. Simulator's process only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtune.core.compat.names import prefill_interval
from kvtune.sim.executor import SimExecutor
from kvtune.sim.fast.jump import JumpStepper
from kvtune.sim.fast.mixed import MixedStepper, schedules_in_order
from kvtune.sim.fast.steady_path import SteadyPath, available
from kvtune.sim.fast.stride import StrideStepper
from kvtune.sim.settings import SimSettings
from kvtune.sim.steps import EngineStepper, Stepper
from kvtune.sim.vllm_types import EngineCore

if TYPE_CHECKING:
    from kvtune.sim.clock import VirtualClock
    from kvtune.sim.front_end import FrontEnd
    from kvtune.sim.journal import ReplayJournal


def steppers(
    engine: EngineCore,
    settings: SimSettings,
    front: FrontEnd,
    clock: VirtualClock,
    journal: ReplayJournal,
    *,
    single_steps: bool,
) -> tuple[Stepper, ...]:
    """`single_steps`: an observer has to see each step of the engine, so there are no strides."""
    # Prefills that wait for a number of steps want each step counted.
    counted = prefill_interval(engine.scheduler) > 1
    jumps = settings.mode != "exact" and not counted
    strides = (
        settings.shortcuts
        and not counted
        and not single_steps
        and isinstance(engine.model_executor, SimExecutor)
        and engine.batch_queue is None
        and available(engine.scheduler)
    )
    jumper = JumpStepper(engine, front, clock, after_strides=strides) if jumps else None
    chosen: list[Stepper] = []
    if strides:
        path = SteadyPath(engine.scheduler)
        leaps = jumps and not settings.digests
        strider = StrideStepper(engine, path, front, clock, journal, leaps=leaps)
        if schedules_in_order(engine.scheduler):
            chosen.append(MixedStepper(engine, path, strider, clock, journal, jumper))
        chosen.append(strider)
    if jumper is not None:
        chosen.append(jumper)
    return (*chosen, EngineStepper(engine))
