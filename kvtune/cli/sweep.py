"""`kvtune sweep`: try the named knobs' values in the simulator, on the engine, or both."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtune.cli import completion, options
from kvtune.run.config import REPORTS


def sweep(
    ctx: typer.Context,
    model: options.Model,
    workload: options.Workload = "",
    trace: options.Trace = None,
    pin: Annotated[bool, typer.Option("--pin", help="Try pin_window, slack and policy.")] = False,
    min_drop: Annotated[
        bool,
        typer.Option(
            "--min-drop",
            help="Try min_drop: keep the windows before the slack only if a step computes at least this many blocks.",
        ),
    ] = False,
    block_size: Annotated[
        bool, typer.Option("--block-size", help="Try the block sizes (or layouts) that suit MODEL.")
    ] = False,
    retention: Annotated[
        bool, typer.Option("--retention", help="Try vLLM's prefix_cache_retention_interval.")
    ] = False,
    chunk: Annotated[bool, typer.Option("--chunk", help="Try max_num_batched_tokens.")] = False,
    gc: Annotated[
        bool, typer.Option("--gc", help="Try the garbage collector's settings; needs the engine.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Try these values: KNOB=V1,V2,..; may be repeated.",
            autocompletion=completion.swept_knobs,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=0, help="Draw this many from the grid; 0: all.")] = 0,
    core: options.Core = "kvtune",
    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="Where trials run: sim, engine or both; or host: on a simulated device.",
            autocompletion=completion.places,
        ),
    ] = "sim",
    objective: options.Objective = "hit-rate",
    slo: options.Slo = "",
    study: Annotated[
        str, typer.Option(help="Journal of the study; one that exists is resumed. Default: a new one in -o.")
    ] = "",
    like_device: options.LikeDevice = "",
    force: options.Force = False,
    dummy: options.Dummy = False,
    seed: options.Seed = 0,
    output: options.Output = REPORTS,
    open_: options.Open = False,
    json: options.Json = False,
) -> int:
    """Try the values of the named knobs on MODEL and WORKLOAD. vLLM's own flags go after `--`."""
    from msgspec import structs

    from kvtune.analysis.study import study_identity
    from kvtune.cli.app import engine_args
    from kvtune.cli.settings import core_choice
    from kvtune.cli.views.plan import announce_study, say_unknown
    from kvtune.cli.views.trials import TrialsView, finish, interrupted
    from kvtune.engine.flags import settings_given
    from kvtune.engine.setup import Real
    from kvtune.fake_device.settings import nominal
    from kvtune.knobs import that_serves
    from kvtune.run.slo import read_slo
    from kvtune.tune import sweep as sweeps
    from kvtune.tune.objective import objective as objective_of
    from kvtune.tune.objective import refuse_times, refuse_unless_replayed
    from kvtune.tune.space.grid import build_space, choose, engine_only, needs_tier
    from kvtune.tune.trials import setup as setups
    from kvtune.tune.trials.journal import StudyJournal

    options.choice("--on", on, ("sim", "engine", "both", "host"))
    limits = read_slo(slo)
    by = objective_of(objective, slo=limits)
    groups = {"pin": pin, "min_drop": min_drop, "block_size": block_size, "retention": retention}
    chosen_groups = [name for name, given in {**groups, "chunk": chunk, "gc": gc}.items() if given]
    setup, work, facts = setups.set_up(
        model,
        setups.workload_spec(workload, trace),
        seed=seed,
        core=core_choice(core),
        engine_args=engine_args(ctx),
        dummy=dummy,
        slo=limits,
        device=nominal() if on == "host" else Real(),
        like=options.like_device(like_device, on=on),
    )
    say_unknown(model, facts)
    space = build_space(chosen_groups, set_ or [], facts)
    simulated, run = on in ("sim", "both"), on != "sim"
    if not run:
        refuse_unless_replayed(by, "--on sim", "sweep with --on host, or with --on engine")
        refuse_times(by, "--on sim")
        engine_only(space)
    if that_serves(space):
        setup = setups.behind_server(setup)
    needs_tier(space, {name.replace("-", "_") for name in settings_given(setup.engine_args)})
    planned = sweeps.planned_trials(setup, choose(space, trials, seed))
    path = setups.study_path(study, output, "sweep", setup)
    sweeps.refuse_foreign_outputs(path, None, study_identity("sweep", setup), force=force)
    with StudyJournal(path, "sweep", setup) as journal:
        held = {trial.key for trial in journal.trials}
        replays, runs = (sum(w.key(at, setup) not in held for w in planned) for at in ("sim", "engine"))
        replays, runs = replays * simulated, runs * run
        announce_study(setup, work, output, replays=replays, runs=runs)
        try:
            with TrialsView(replays + runs, by) as view:
                if simulated:
                    sweeps.run_sim(setup, planned, journal, view)
                if run:
                    sweeps.run_engine(setup, planned, journal, output, view)
        except KeyboardInterrupt:
            return interrupted(journal)
        result = sweeps.result(journal.trials, by)
        if simulated and (why := sweeps.pool_that_hits(setup, journal.trials)):
            result = structs.replace(result, notes=(why,))
    finish(result, journal.trials, path, by, as_json=json, opened=open_, force=force)
    sweeps.fail_if_none(journal.trials)
    return 0
