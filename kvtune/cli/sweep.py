"""`kvtune sweep`: try the named knobs' values, in the simulator, on the engine, or both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def sweep(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="What `vllm serve` takes, or a built-in tiny model.")],
    workload: Annotated[str, typer.Option("-w", "--workload", help="name or name:key=value,..")] = "",
    trace: Annotated[Path | None, typer.Option(help="A trace file, instead of -w.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Pin window, slack and policy.")] = False,
    min_drop: Annotated[bool, typer.Option("--min-drop", help="Smallest window drop that pins.")] = False,
    block_size: Annotated[bool, typer.Option("--block-size", help="Block sizes legal for MODEL.")] = False,
    retention: Annotated[bool, typer.Option("--retention", help="vLLM's retention interval.")] = False,
    chunk: Annotated[bool, typer.Option("--chunk", help="Tokens of a step.")] = False,
    gc: Annotated[bool, typer.Option("--gc", help="Freeze, thresholds, collecting at a wait.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KNOB=V1,V2,..; may be repeated.")] = None,
    trials: Annotated[int, typer.Option(min=0, help="Draw this many from the grid; 0: all.")] = 0,
    core: Annotated[str, typer.Option(help="KV core of the trials: kvtune or stock.")] = "kvtune",
    on: Annotated[str, typer.Option("--on", help="sim, engine, or both.")] = "sim",
    objective: Annotated[
        str, typer.Option(help="hit-rate, ttft, throughput, goodput; or several, by commas.")
    ] = "hit-rate",
    slo: Annotated[
        str, typer.Option("--slo", help="Limits in ms for goodput: ttft=500,tpot=50,e2e=8000.")
    ] = "",
    study: Annotated[str, typer.Option(help="Journal file; an existing one is resumed.")] = "",
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights on the real config.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the workload and of --trials.")] = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for results.")] = Path("reports"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> int:
    """Try the values of the named knobs on MODEL and WORKLOAD. vLLM's own flags stand after `--`."""
    from kvtune.cli.app import engine_args
    from kvtune.cli.settings import core_choice
    from kvtune.cli.views.trials import TrialsView, print_results, write_study_page
    from kvtune.errors import EXIT_INTERRUPTED, UsageError
    from kvtune.run.slo import read_slo
    from kvtune.tune import sweep as sweeps
    from kvtune.tune.objective import objective as objective_of
    from kvtune.tune.space.grid import build_space, choose, engine_only
    from kvtune.tune.trials import bench as benches
    from kvtune.tune.trials.journal import StudyJournal

    if on not in ("sim", "engine", "both"):
        raise UsageError(f"--on {on} is no place", "--on takes sim, engine or both")
    limits_of = read_slo(slo)
    by = objective_of(objective, slo=limits_of)
    flags = {"pin": pin, "min_drop": min_drop, "block_size": block_size, "retention": retention}
    groups = [name for name, asked in {**flags, "chunk": chunk, "gc": gc}.items() if asked]
    bench, work, facts = benches.set_up(
        model,
        benches.workload_spec(workload, trace),
        seed=seed,
        core=core_choice(core),
        engine_args=engine_args(ctx),
        dummy=dummy,
        slo=limits_of,
    )
    space = build_space(groups, set_ or [], facts)
    if on == "sim":
        engine_only(space)
    asked = sweeps.wanted(bench, choose(space, trials, seed))
    path = benches.study_path(study, output, "sweep", bench)
    with StudyJournal(path, "sweep", bench) as journal:
        try:
            with TrialsView(len(asked) * (1 + (on == "both")) - len(journal.trials), by) as view:
                if on != "engine":
                    sweeps.run_sim(bench, asked, journal, view)
                if on != "sim":
                    sweeps.run_engine(bench, work, asked, journal, output, view)
        except KeyboardInterrupt:
            print(f"kvtune: interrupted after {len(journal.trials)} trials", file=sys.stderr)
            print(f"  next: the same command with --study {path} goes on", file=sys.stderr)
            return EXIT_INTERRUPTED
        found = sweeps.result(journal.trials, by)
    page = write_study_page(path, by)
    found |= {"study": str(path), "page": str(page)}
    sweeps.keep_result(found, path)
    if json:
        print(sweeps.encoded(found))
    else:
        print_results(found, journal.trials, by)
        print(f"journal   {path}\npage      {page}")
    sweeps.fail_if_none(journal.trials)
    return 0
