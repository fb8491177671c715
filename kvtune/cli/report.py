"""`kvtune report RUN..|STUDY`: the page of a run, a comparison or a study, or the same on the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli import completion, options
from kvtune.terminal import one_line


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="One run file (.kvrun, or `last`), several to compare, or the journal (.jsonl) of a study.",
            parser=options.run_path,
            autocompletion=completion.runs_and_studies,
            metavar="RUNS...",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page to write. Default: beside the first file.")
    ] = None,
    force: options.Force = False,
    console: Annotated[
        bool, typer.Option("--console", help="Print to the terminal and write no page.")
    ] = False,
    objective: options.Objective = "hit-rate",
    trace: options.RunTrace = None,
    open_: options.Open = False,
) -> None:
    """Draw a run, a comparison of runs, or a study of sweep or tune as one self-contained HTML file."""
    from kvtune.analysis.rebuild import with_workload
    from kvtune.analysis.run import RunAnalysis
    from kvtune.run.file import read_run
    from kvtune.tune.study import is_study

    if any(is_study(path) for path in runs):
        _study(runs, output, objective, force=force, console=console, opened=open_)
        return

    loaded = [read_run(path) for path in runs]
    if len(loaded) == 1:
        analysis = RunAnalysis(*with_workload(loaded[0], trace), str(runs[0]))
        if console:
            from kvtune.report.console.summary import print_summary

            print_summary(analysis)
            return
        from kvtune.report.pages.run import run_page

        html, beside = run_page(analysis), runs[0].with_suffix(".html")
    else:
        from kvtune.report.contrast import contrast
        from kvtune.report.pages.run import compare_page

        made = contrast(loaded, [path.stem for path in runs])
        if console:
            from kvtune.report.console.comparison import print_comparison

            print_comparison(made)
            return
        html, beside = compare_page(made), runs[0].with_name(f"{runs[0].stem}-compared.html")
    private = any(run.private for run in loaded)
    _put(html, output or beside, force=force, opened=open_, private=private)


def _study(
    paths: list[Path], output: Path | None, objective: str, *, force: bool, console: bool, opened: bool
) -> None:
    from kvtune.errors import UsageError
    from kvtune.report.pages.study import study_page
    from kvtune.tune.objective import objective as objective_of
    from kvtune.tune.study import read_study, recipe_of, saved_result, view

    if len(paths) > 1:
        raise UsageError(
            "a study cannot be drawn together with other files", "give one study, or run files only"
        )
    by, study = objective_of(objective), read_study(paths[0])
    saved = saved_result(paths[0], study)
    shown = view(study, by, recipe_of(paths[0], saved), saved)
    if console:
        from kvtune.cli.views.trials import print_results

        print_results(shown, study.trials, by)
        return
    _put(study_page(shown), output or paths[0].with_suffix(".html"), force=force, opened=opened)


def _put(html: str, page: Path, *, force: bool, opened: bool, private: bool = False) -> None:
    """Write the page, and open it if `opened`. An existing page is opened as it is unless `force`."""
    from kvtune.report.files import write_new

    if not (opened and page.is_file() and not force):
        write_new(html, page, force=force, private=private)
        print(one_line(str(page)))
    else:
        print(one_line(f"{page} (as it was: --force draws it anew)"))
    if opened:
        from kvtune.cli.views.browser import open_page

        open_page(page)
