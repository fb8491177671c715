"""The objects that cause collections, by process, type and line; and the lines in which collections began."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.analysis.culprits import Culprit
from kvtune.analysis.run import RunAnalysis
from kvtune.report.charts import Cell, Grid, Section, grid
from kvtune.report.names import process_title, source_line
from kvtune.units import count, percent, size

SHOWN = 15
TITLES = {"sites": "young objects by type and line", "types": "young objects by type"}


def section(analysis: RunAnalysis) -> Section | None:
    grids = [
        _grid(f"{process_title(key)}: {TITLES[sampled.level]}", sampled.rows)
        for key, sampled in analysis.culprits.items()
    ]
    begun = [
        grid(
            ("line", "collections"),
            [(source_line(*_split(line)), Cell(count(n), n)) for line, n in ledger.triggers],
            f"{process_title(key)}: the lines in which collections began",
        )
        for key, ledger in analysis.ledgers.items()
        if ledger.triggers
    ]
    if not grids and not begun:
        return None
    lead = "The collector runs when enough young objects have survived. These are the objects and where they were made."
    if not grids:
        lead = "The lines in which collections began. `--probe sites` shows which objects caused them."
    return Section(
        "culprits", "What causes collections", lead, "culprits.html", values={"grids": grids, "begun": begun}
    )


def _split(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return (file, int(number)) if number.isdigit() else (line, 0)


def _grid(title: str, rows: Sequence[Culprit]) -> Grid:
    cells = [
        (
            row.type,
            source_line(row.file, row.line),
            "–" if row.per_step is None else Cell(f"{row.per_step:,.3g}", row.per_step),
            Cell(percent(row.share), row.share),
            Cell(count(row.count), row.count),
            Cell(size(row.bytes), row.bytes),
        )
        for row in rows[:SHOWN]
    ]
    heads = ("type", "made in", "objects per step", "share", "counted", "bytes")
    return grid(heads, cells, title)
