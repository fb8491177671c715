"""`kvtune profile --on sim`: one simulated run, from job to run file. In the CLI's process; imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable

from kvtune.engine.profile import Profiled, ProfileJob, check_output, reserved, run_name
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.fake_device.copies import CopyTime
from kvtune.fake_device.cost import NOMINAL
from kvtune.run.file import write_run
from kvtune.run.slo import with_slo
from kvtune.run.types import Run
from kvtune.sim.like import copy_of, cost_of, engine_of
from kvtune.sim.pool import sized
from kvtune.sim.settings import Mode, SimSettings
from kvtune.sim.simulators import Simulators
from kvtune.sim.worker import Report


def profile(
    simulators: Simulators, job: ProfileJob, settings: SimSettings, on_report: Callable[[Report], None]
) -> Profiled:
    """Replay the job's workload and write the run file. If Ctrl-C ends the replay, the run file is partial."""
    check_output(job.output)
    with reserved(job.output, f"{run_name(job)}_sim") as (_, path):
        run, error = _replayed(simulators, job, settings, on_report)
        run = with_slo(run, job.slo)
        write_run(run, path, new=True)
    return Profiled(run, path, error)


def _replayed(
    simulators: Simulators, job: ProfileJob, settings: SimSettings, on_report: Callable[[Report], None]
) -> tuple[Run, KvtuneError | None]:
    """Return the run and None; after Ctrl-C, the partial run and an error."""
    run: Run | None = None
    error: KvtuneError | None = None
    try:
        for _, outcome in simulators.map(job.workload, [settings], on_report, job.command):
            if isinstance(outcome, KvtuneError):
                raise outcome
            run = outcome
    except KeyboardInterrupt:
        if run is None:
            raise
        error = KvtuneError(
            "interrupted", "the replay so far is in the run file, marked partial", EXIT_INTERRUPTED
        )
    if run is None:
        raise KvtuneError("the replay ended without a run", "run the command again with --debug")
    return run, error


def settings_for(job: ProfileJob, mode: Mode, like: Run | None, *, trusted: bool = False) -> SimSettings:
    """Return the settings of a job's simulated engine. Raise UsageError if that engine cannot be simulated.

    `like`: a recorded run whose engine is simulated, with the run's KV specs, pool, flags (the job's flags override
    them) and a step cost fitted to the run's steps. `trusted`: the user vouches for the run file.
    """
    flags, specs, cost, async_scheduling = list(job.engine_args), {}, NOMINAL, None
    like_device = job.like_device
    copy = CopyTime()
    if like is not None:
        engine = engine_of(like, trusted=trusted)
        flags, specs = [*engine.args, *flags], engine.kv_specs
        async_scheduling, like_device = engine.async_scheduling, engine.like_device
        cost, copy = cost_of(like), copy_of(like)
    return sized(
        SimSettings(
            model=job.model,
            engine_args=flags,
            core=job.core,
            core_settings=job.core_settings,
            mode=mode,
            cost=cost,
            copy=copy,
            specs=specs,
            async_scheduling=async_scheduling,
            like_device=like_device,
            from_recipe=sorted(job.from_recipe),
        )
    )
