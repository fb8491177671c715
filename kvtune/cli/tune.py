"""`kvtune tune`: search the settings for a model and its traffic, prove the gain on the engine, write a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def tune(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="What `vllm serve` takes, or a built-in tiny model.")],
    workload: Annotated[str, typer.Option("-w", "--workload", help="name or name:key=value,..")] = "",
    trace: Annotated[Path | None, typer.Option(help="A trace file, instead of -w.")] = None,
    objective: Annotated[
        str, typer.Option(help="hit-rate, ttft, throughput, goodput; or several, by commas.")
    ] = "hit-rate",
    trials: Annotated[int, typer.Option(min=1, help="Simulated trials.")] = 40,
    finalists: Annotated[int, typer.Option(min=1, help="Settings that go to the engine.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Engine runs of each at most.")] = 4,
    budget: Annotated[float, typer.Option(help="Seconds; no new round on the engine after it.")] = 600.0,
    on: Annotated[str, typer.Option("--on", help="both (confirm on the engine), or sim.")] = "both",
    slo: Annotated[
        str, typer.Option("--slo", help="Limits in ms for goodput: ttft=500,tpot=50,e2e=8000.")
    ] = "",
    study: Annotated[str, typer.Option(help="Journal file to go on with, or a database URL.")] = "",
    join: Annotated[bool, typer.Option("--join", help="Join the study at --study URL.")] = False,
    guard: Annotated[
        list[str] | None,
        typer.Option(
            help="Another load: settings that hit over a point less than stock there are dropped (repeatable)."
        ),
    ] = None,
    gc: Annotated[
        bool, typer.Option("--gc", help="Also try the collector's settings on the engine.")
    ] = False,
    admission: Annotated[
        bool, typer.Option("--admission", help="Also try letting who has most in the cache go first.")
    ] = False,
    recipe: Annotated[Path | None, typer.Option(help="Where the recipe goes.")] = None,
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights on the real config.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the workload and of the search.")] = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for journal and runs.")] = Path(
        "reports"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Tune MODEL for WORKLOAD: simulate, confirm on the engine, write a recipe. vLLM's flags stand after `--`."""
    from kvtune.cli.app import engine_args
    from kvtune.cli.views.trials import TrialsView, print_results, write_study_page
    from kvtune.errors import EXIT_INTERRUPTED, UsageError
    from kvtune.run.slo import read_slo
    from kvtune.tune import tune as tuning
    from kvtune.tune.objective import objective as objective_of
    from kvtune.tune.sweep import encoded, keep_result
    from kvtune.tune.trials import bench as benches
    from kvtune.tune.trials.journal import StudyJournal
    from kvtune.workload.spec import build

    if on not in ("both", "sim"):
        raise UsageError(f"--on {on} is no place", "--on takes both or sim")
    limits_of = read_slo(slo)
    if gc and on == "sim":
        raise UsageError("--gc needs the engine: a simulation knows no collector", "leave out --on sim")
    by = objective_of(objective, slo=limits_of)
    spec = benches.workload_spec(workload, trace)
    bench, work, facts = benches.set_up(
        model, spec, seed=seed, core="kvtune", engine_args=engine_args(ctx), dummy=dummy, slo=limits_of
    )
    url = study if "://" in study else ""
    if join and not url:
        raise UsageError("--join needs the database of a study", "add --study URL")
    if join and guard:
        raise UsageError("--guard belongs to whoever began the study", "leave it out with --join")
    if url and not join:
        path = benches.stored_study_path(url, output, bench)
    else:
        path = benches.study_path("" if url else study, output, "tune", bench)
    for each in guard or ():
        build(each, seed=seed)  # refused before anything is started
    limits = tuning.Limits(trials, finalists, rounds, budget, on == "both", tuple(guard or ()), admission, gc)
    with StudyJournal(path, "tune", bench) as journal:
        try:
            with TrialsView(trials + 2 + (on == "both") * (finalists + 1) * 2, by) as view:
                tuned = tuning.tune(
                    *(bench, work, facts, by, journal, limits),
                    seed=seed,
                    output=output,
                    recipe=recipe or path.with_suffix(".toml"),
                    say=view,
                    phase=view.phase,
                    storage=url,
                    join=join,
                )
        except KeyboardInterrupt:
            print(f"kvtune: interrupted after {len(journal.trials)} trials", file=sys.stderr)
            print(f"  next: the same command with --study {path} goes on", file=sys.stderr)
            return EXIT_INTERRUPTED
    page = write_study_page(path, by, tuned.recipe)
    found = {**tuning.plain(tuned), "study": str(path), "page": str(page)}
    keep_result(found, path)
    if json:
        print(encoded(found))
        return 0
    print_results(found, tuned.trials, by)
    print(f"journal   {path}\npage      {page}")
    print(f"recipe    {tuned.recipe or 'none: nothing was shown to be better than stock'}")
    return 0
