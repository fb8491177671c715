"""`kvtune export RUN --perfetto|--speedscope|--csv [-o FILE]`: a run for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run file (.kvrun).")],
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Chrome trace JSON: ui.perfetto.dev opens it.")
    ] = False,
    speedscope: Annotated[
        bool, typer.Option("--speedscope", help="speedscope JSON: speedscope.app opens it.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="A folder of CSV files, one a table.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write; beside the run file unless given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Write a run as a Perfetto trace, a speedscope profile or CSV."""
    from kvtune.errors import UsageError
    from kvtune.report.files import write_new
    from kvtune.run.file import read_run

    if perfetto + speedscope + csv != 1:
        raise UsageError("export needs exactly one format", "give one of --perfetto, --speedscope, --csv")
    found = read_run(run)
    if csv:
        from kvtune.report.export.csv import write_csv

        folder = output or run.with_name(f"{run.stem}.csv")
        for path in write_csv(found, folder, force=force):
            print(path)
        return
    made: dict[str, Any]
    if perfetto:
        from kvtune.report.export.trace import chrome_trace

        made, suffix = chrome_trace(found), ".trace.json"
    else:
        from kvtune.report.export.speedscope import speedscope as speedscope_file

        made, suffix = speedscope_file(found), ".speedscope.json"
    import json

    text = json.dumps(made, separators=(",", ":"), allow_nan=False)
    print(write_new(text, output or run.with_name(f"{run.stem}{suffix}"), force=force))
