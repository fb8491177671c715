"""Replays a workload through vLLM's own EngineCore, scheduler, coordinator and pool on a virtual clock.

Runs in a simulator process (worker.py), or in any process that may import vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtune.run.types import Run
from kvtune.sim.build import build
from kvtune.sim.clock import VirtualClock, policies_see
from kvtune.sim.observers import Observer, ReplayProgress
from kvtune.sim.player import Player
from kvtune.sim.record import record
from kvtune.sim.settings import SimSettings
from kvtune.sim.verdicts.observer import VerdictObserver
from kvtune.workload.types import Workload


def replay(
    workload: Workload,
    settings: SimSettings,
    *,
    observers: Sequence[Observer] = (),
    progress: Callable[[ReplayProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    command: Sequence[str] = (),
) -> Run:
    """Replay `workload` on the simulated engine; return the run (source "sim").

    If `stop` returns True, or on KeyboardInterrupt, the replay ends early and the run is marked partial.
    """
    from kvtune.engine.host import check_fits

    started = time.monotonic()
    clock = VirtualClock()
    verdicts = VerdictObserver(workload) if settings.verdicts else None
    if verdicts is not None:
        observers = [*observers, verdicts]
    with policies_see(clock):
        engine = build(settings, clock)
        try:
            check_fits(workload, int(engine.vllm_config.model_config.max_model_len))
            built_s = time.monotonic() - started
            player = Player(workload, settings, engine, clock, observers, progress, stop)
            why = player.play()
            run = record(
                player.journal,
                workload,
                settings,
                engine,
                clock,
                why=why,
                startup_s=built_s,
                elapsed_s=time.monotonic() - started - built_s,
                command=command,
            )
            return run if verdicts is None else verdicts.add_to(run)
        finally:
            engine.scheduler.shutdown()
