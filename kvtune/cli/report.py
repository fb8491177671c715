"""`kvtune report RUN..|STUDY`: a run's page, a comparison's, a study's, or any of them on the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run files (.kvrun): one for its page, more to compare. Or a study.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page; beside the first run file unless given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a page that exists.")] = False,
    console: Annotated[bool, typer.Option("--console", help="Print here and write no page.")] = False,
    objective: Annotated[
        str, typer.Option(help="Of a study: hit-rate, ttft, throughput or goodput.")
    ] = "hit-rate",
) -> None:
    """Draw a run, several beside each other, or a sweep's study as one HTML file that needs nothing else."""
    from kvtune.analysis.rebuild import workload_of
    from kvtune.analysis.run import RunAnalysis
    from kvtune.run.file import read_run
    from kvtune.tune.study import is_study

    if any(is_study(path) for path in runs):
        _study(runs, output, objective, force=force, console=console)
        return

    found = [read_run(path) for path in runs]
    if len(found) == 1:
        analysis = RunAnalysis(found[0], workload_of(found[0]))
        if console:
            from kvtune.analysis.summary import summary
            from kvtune.report.console.summary import print_summary

            print_summary(summary(analysis))
            return
        from kvtune.report.pages.frame import write_page
        from kvtune.report.pages.run import run_page

        html, beside = run_page(analysis), runs[0].with_suffix(".html")
    else:
        from kvtune.report.contrast import contrast
        from kvtune.report.pages.frame import write_page
        from kvtune.report.pages.run import compare_page

        made = contrast(found, [path.stem for path in runs])
        if console:
            from kvtune.report.console.comparison import print_comparison

            print_comparison(made)
            return
        html, beside = compare_page(made), runs[0].with_name(f"{runs[0].stem}-compared.html")
    print(write_page(html, output or beside, force=force))


def _study(paths: list[Path], output: Path | None, objective: str, *, force: bool, console: bool) -> None:
    from kvtune.errors import UsageError
    from kvtune.report.pages.frame import write_page
    from kvtune.report.pages.study import sweep_page
    from kvtune.tune.objective import objective as objective_of
    from kvtune.tune.study import read_study, recipe_of, saved_result, told

    if len(paths) > 1:
        raise UsageError("a study has a page of its own", "give one study, or run files only")
    by, study = objective_of(objective), read_study(paths[0])
    saved = saved_result(paths[0], study)
    found = told(study, by, recipe_of(paths[0], saved), saved)
    if console:
        from kvtune.cli.views.trials import print_results

        print_results(found, study.trials, by)
        return
    print(write_page(sweep_page(found), output or paths[0].with_suffix(".html"), force=force))
