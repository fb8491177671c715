"""Chooses a replay's steppers, once, in the order in which the player tries them. Simulator's process only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtune.sim.engine_types import EngineCore
from kvtune.sim.executor import SimExecutor
from kvtune.sim.fast.in_flight import InFlight
from kvtune.sim.fast.steady_path import SteadyPath, available
from kvtune.sim.fast.stride import StrideStepper
from kvtune.sim.settings import SimSettings
from kvtune.sim.steps import EngineStepper, Stepper
from kvtune.vllm.names import prefill_interval

if TYPE_CHECKING:
    from kvtune.sim.clock import VirtualClock
    from kvtune.sim.journal import ReplayJournal
    from kvtune.sim.transport import Transport


def steppers(
    engine: EngineCore,
    settings: SimSettings,
    transport: Transport,
    clock: VirtualClock,
    journal: ReplayJournal,
    *,
    single_steps: bool,
) -> tuple[Stepper, ...]:
    """Return the steppers. `single_steps`: an observer must see every single step, so strides are left out."""
    # To space prefills, vLLM counts single steps; a step with draft tokens is no plain decode.
    counted = prefill_interval(engine.scheduler) > 1 or bool(engine.scheduler.num_spec_tokens)
    queue = engine.batch_queue
    strides = (
        settings.shortcuts
        and not counted
        and not single_steps
        and isinstance(engine.model_executor, SimExecutor)
        and available(engine.scheduler, batches=1 if queue is None else engine.batch_queue_size)
    )
    last = EngineStepper(engine)
    if not strides:
        return (last,)
    path = SteadyPath(engine.scheduler)
    in_flight = None if queue is None else InFlight(engine)
    leaps = settings.mode == "jump" and not settings.digests
    return (StrideStepper(engine, path, transport, clock, journal, in_flight, leaps=leaps), last)
