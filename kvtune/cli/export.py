"""`kvtune export RUN --perfetto|--csv [-o FILE]`: a run in another tool's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtune.cli import options
from kvtune.cli.query import Query, option
from kvtune.data.show.terminal import one_line


@dataclass(frozen=True, kw_only=True)
class ExportQuery(Query):
    run: options.RunFile
    perfetto: bool = option(False)("Chrome trace JSON, for ui.perfetto.dev.")
    csv: bool = option(False)("A folder of CSV files, one per table.")
    output: Path | None = option(None, "-o,--output PATH", parser=options.new_export_path)(
        "Where to write. Default: beside the run file."
    )
    force: options.Force = False


def export(query: ExportQuery) -> None:
    """Write a run as a Perfetto trace or CSV."""
    from kvtune.base.errors import UsageError
    from kvtune.base.files import write_new
    from kvtune.data.run.file import read_run

    if query.perfetto == query.csv:
        raise UsageError("export needs exactly one format", "give --perfetto or --csv")
    loaded = read_run(query.run)
    if query.csv:
        from kvtune.reading.report.export.csv import write_csv

        folder = query.output or query.run.with_name(f"{query.run.stem}.csv")
        for path in write_csv(loaded, folder, force=query.force):
            print(one_line(str(path)))
        return
    import json

    from kvtune.reading.report.export.trace import chrome_trace

    text = json.dumps(chrome_trace(loaded), separators=(",", ":"), allow_nan=False)
    made_as = query.output or query.run.with_name(f"{query.run.stem}.trace.json")
    write_new(text, made_as, force=query.force, private=loaded.private)
    print(one_line(str(made_as)))
