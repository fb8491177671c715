"""Replays a workload through vLLM's own EngineCore, scheduler, coordinator and pool on a virtual clock.

Runs in a simulator process (worker.py), or in any process that may import vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.build import build
from kvtune.lab.sim.clock import VirtualClock, policies_see
from kvtune.lab.sim.engine_types import EngineCore, Observer, ReplayProgress
from kvtune.lab.sim.idle import idle_of
from kvtune.lab.sim.player import Player
from kvtune.lab.sim.record import Played, record
from kvtune.lab.sim.verdicts.observer import VerdictObserver, with_verdicts
from kvtune.plugin.core import state
from kvtune.requests.types import Workload


def replay(
    workload: Workload,
    setup: Setup,
    *,
    observers: Sequence[Observer] = (),
    progress: Callable[[ReplayProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Run:
    """Replay `workload` on the simulated engine; return the run (source "sim").

    With a router, several engines share the load (`replicas`). If `stop` returns True, or on KeyboardInterrupt, the
    replay ends early and the run is marked partial.
    """
    if setup.simulated.router:
        return _of_fleet(workload, setup, progress, stop)
    from kvtune.lab.engine.host import check_fits

    started = time.monotonic()
    clock = VirtualClock()
    verdicts = VerdictObserver(workload) if setup.simulated.verdicts else None
    if verdicts is not None:
        observers = [*observers, verdicts]
    with policies_see(clock):
        engine = build(setup, clock)
        try:
            check_fits(workload, int(engine.vllm_config.model_config.max_model_len))
            built_s = time.monotonic() - started
            player = Player(workload, setup.simulated, engine, clock, observers, progress, stop)
            why = player.play()
            run = record(
                [Played(player.journal, engine, state.state())],
                workload,
                setup,
                clock.now_s,
                why=why,
                startup_s=built_s,
                elapsed_s=time.monotonic() - started - built_s,
            )
            if setup.simulated.idle and not why:
                run = run.with_extra(idle=_idle(engine, setup.simulated.idle))
            return run if verdicts is None else with_verdicts(run, [verdicts])
        finally:
            engine.scheduler.shutdown()


def _idle(engine: EngineCore, tokens: int) -> dict[str, object]:
    """Return what an idle conversation of this many tokens keeps in the engine's pool; {} if it is too long."""
    longest = int(engine.vllm_config.model_config.max_model_len)
    measured = idle_of(engine, longest, pool_known=True, lengths=[tokens])
    return dict(msgspec.to_builtins(measured[0])) if measured else {}


def _of_fleet(
    workload: Workload,
    setup: Setup,
    progress: Callable[[ReplayProgress], None] | None,
    stop: Callable[[], bool] | None,
) -> Run:
    from kvtune.lab.engine.host import check_fits
    from kvtune.lab.sim.fleet import Fleet

    started = time.monotonic()
    before = state.books()
    fleet = Fleet(workload, setup)
    try:
        check_fits(workload, int(fleet.members[0].engine.vllm_config.model_config.max_model_len))
        built_s = time.monotonic() - started
        verdicts = [VerdictObserver(workload) for _ in fleet.members] if setup.simulated.verdicts else []
        why = fleet.play([[verdict] for verdict in verdicts] or [[] for _ in fleet.members], progress, stop)
        run = record(
            [Played(member.replica.journal, member.engine, member.books.state()) for member in fleet.members],
            workload,
            setup,
            fleet.ended_s,
            why=why,
            startup_s=built_s,
            elapsed_s=time.monotonic() - started - built_s,
        )
        return with_verdicts(run, verdicts) if verdicts else run
    finally:
        state.use(before)
        fleet.shutdown()
