"""`kvtune report RUN..`: one run's page, a comparison's page, or either on the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run files (.kvrun): one for its page, more to compare.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page; beside the first run file unless given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a page that exists.")] = False,
    console: Annotated[bool, typer.Option("--console", help="Print here and write no page.")] = False,
) -> None:
    """Draw one run, or several beside each other, as one HTML file that needs nothing else."""
    from kvtune.analysis.rebuild import workload_of
    from kvtune.run.file import read_run

    found = [read_run(path) for path in runs]
    if len(found) == 1:
        run, workload = found[0], workload_of(found[0])
        if console:
            from kvtune.analysis.summary import summary
            from kvtune.report.console import print_summary

            print_summary(summary(run, workload))
            return
        from kvtune.report.page import run_page, write_page

        html, beside = run_page(run, workload), runs[0].with_suffix(".html")
    else:
        from kvtune.report.contrast import contrast
        from kvtune.report.page import compare_page, write_page

        made = contrast(found, [path.stem for path in runs])
        if console:
            from kvtune.report.comparison_text import print_comparison

            print_comparison(made)
            return
        html, beside = compare_page(made), runs[0].with_name(f"{runs[0].stem}-compared.html")
    print(write_page(html, output or beside, force=force))
