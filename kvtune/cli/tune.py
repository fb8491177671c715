"""`kvtune tune`: search the settings for a model and its traffic, prove the gain on the engine, write a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli import completion, options
from kvtune.errors import UsageError
from kvtune.knobs import of_front_end
from kvtune.run.config import REPORTS


def tune(
    ctx: typer.Context,
    model: options.Model,
    workload: options.Workload = "",
    trace: options.Trace = None,
    core: Annotated[
        str,
        typer.Option(
            "--core",
            help="kvtune: search the core's settings and vLLM's; stock: vLLM's own flags alone, for a server without "
            "kvtune.",
            autocompletion=completion.cores,
        ),
    ] = "kvtune",
    objective: options.Objective = "hit-rate",
    trials: Annotated[int, typer.Option(min=1, help="Simulated trials.")] = 40,
    finalists: Annotated[
        int, typer.Option(min=1, help="How many of the best settings to confirm on the engine.")
    ] = 2,
    rounds: Annotated[
        int, typer.Option(min=2, help="Engine runs of stock and of each finalist, at most.")
    ] = 4,
    budget: Annotated[
        float, typer.Option(help="Seconds for the engine runs; two rounds run in any case.")
    ] = 600.0,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="both: search in simulation, confirm on the engine; sim alone; "
            "or host: confirm on a simulated device, in a GPU engine's shape.",
            autocompletion=completion.tuned_on,
        ),
    ] = "both",
    slo: options.Slo = "",
    study: Annotated[
        str, typer.Option(help="Journal of the study, resumed if it exists, or a database URL to share one.")
    ] = "",
    join: Annotated[
        bool, typer.Option("--join", help="Add trials to the shared study at --study URL.")
    ] = False,
    guard: Annotated[
        list[str] | None,
        typer.Option(
            help="Another workload: settings whose hit rate there is over a point below stock's are dropped; "
            "repeatable.",
            autocompletion=completion.workloads,
        ),
    ] = None,
    gc: Annotated[
        bool, typer.Option("--gc", help="Also try the garbage collector's settings on the engine.")
    ] = False,
    knobs: Annotated[
        str,
        typer.Option(
            help=f"With --objective ceiling: what to try, of {', '.join(of_front_end())}. Default: the first.",
            autocompletion=completion.front_end_knobs,
        ),
    ] = "",
    recipe: Annotated[
        Path | None, typer.Option(help="Where to write the recipe. Default: beside the journal.")
    ] = None,
    like_device: options.LikeDevice = "",
    force: options.Force = False,
    dummy: options.Dummy = False,
    seed: options.Seed = 0,
    output: options.Output = REPORTS,
    open_: options.Open = False,
    json: options.Json = False,
) -> int:
    """Tune MODEL for WORKLOAD: simulate, confirm on the engine, write a recipe. vLLM's flags go after `--`."""
    from kvtune.analysis.study import study_identity
    from kvtune.cli.app import engine_args
    from kvtune.cli.settings import core_choice
    from kvtune.cli.views.plan import announce_study, say_unknown
    from kvtune.cli.views.trials import TrialsView, finish, interrupted
    from kvtune.engine.resolve import tokenizer_of
    from kvtune.engine.setup import Real
    from kvtune.fake_device.settings import nominal
    from kvtune.knobs import front_end_knobs, that_serves
    from kvtune.run.slo import read_slo
    from kvtune.tune import tune as tuning
    from kvtune.tune.objective import objective as objective_of
    from kvtune.tune.objective import refuse_times, refuse_unless_replayed
    from kvtune.tune.search import SearchSettings
    from kvtune.tune.sweep import refuse_foreign_outputs
    from kvtune.tune.trials import setup as setups
    from kvtune.tune.trials.journal import StudyJournal
    from kvtune.workload.spec import build

    options.choice("--on", on, ("both", "sim", "host"))
    chosen = core_choice(core)
    limits = read_slo(slo)
    if gc and on == "sim":
        raise UsageError("--gc needs the engine: a simulation has no garbage collector", "leave out --on sim")
    if gc and chosen == "stock":
        raise UsageError("--gc tries settings of kvtune's core", "leave out --core stock, or --gc")
    by = objective_of(objective, slo=limits)
    simulating = {
        "--on sim": on == "sim",
        "--guard": guard,
        "--study URL": "://" in study,
    }
    for flag, given in simulating.items():
        if given:
            refuse_unless_replayed(by, flag, "leave it out, or name another objective")
    if on == "sim":
        refuse_times(by, "--on sim")
    tried = front_end_knobs(knobs)
    if tried and by.replayed:
        raise UsageError(
            "--knobs is for figures that no simulation has", "leave it out, or add --objective ceiling"
        )
    spec = setups.workload_spec(workload, trace)
    setup, work, facts = setups.set_up(
        model,
        spec,
        seed=seed,
        core=chosen,
        engine_args=engine_args(ctx),
        dummy=dummy,
        slo=limits,
        device=nominal() if on == "host" else Real(),
        like=options.like_device(like_device, on=on),
    )
    say_unknown(model, facts)
    if that_serves(tried):
        setup = setups.behind_server(setup)
    url = study if "://" in study else ""
    if join and not url:
        raise UsageError("--join needs the database of a study", "add --study URL")
    if join and guard:
        raise UsageError("--guard belongs to the worker that began the study", "leave it out with --join")
    if url and not join:
        path = setups.stored_study_path(url, output, setup)
    else:
        path = setups.study_path("" if url else study, output, "tune", setup)
    for each in guard or ():
        build(
            each, seed=seed, tokenizer=tokenizer_of(model, setup.engine_args)
        )  # a bad spec is refused before anything starts
    settings = tuning.TuneSettings(
        setup=setup,
        facts=facts,
        by=by,
        output=output,
        recipe=recipe or path.with_suffix(".toml"),
        force=force,
        search=SearchSettings(trials=trials, seed=seed, storage=url, join=join),
        finalists=finalists,
        rounds=rounds,
        budget_s=budget,
        on_engine=on != "sim",
        guards=tuple(guard or ()),
        collector=gc,
        knobs=tried,
    )
    engine_sides = 1 + finalists + gc * len(tuning.COLLECTOR)
    if not by.replayed:
        engine_sides = 1 + len(tuning.tried_without_replays(settings))
    most = (on != "sim" and not join) * (rounds * engine_sides + 1)
    replays = (trials + 1) * by.replayed
    announce_study(setup, work, output, replays=replays, runs=most, most=True)
    refuse_foreign_outputs(path, settings.recipe, study_identity("tune", setup), force=force)
    with StudyJournal(path, "tune", setup) as journal:
        try:
            fewest = (on != "sim") * (engine_sides if not by.replayed else finalists + 1) * 2
            with TrialsView(replays + 1 + fewest, by) as view:
                result = tuning.tune(settings, journal, view)
        except KeyboardInterrupt:
            return interrupted(journal)
    finish(result, result.trials, path, by, as_json=json, opened=open_, force=force)
    if not json:
        print(f"recipe    {result.recipe or 'none: nothing was shown to be better than stock'}")
    return 0
