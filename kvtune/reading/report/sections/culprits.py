"""The objects that cause collections, by process, type and line; and the lines where collections began."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.base.units import count, percent, size
from kvtune.data.show.parts import Grid, Section, cell, grid, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.again import profile_line
from kvtune.reading.analysis.culprits import Culprit
from kvtune.reading.analysis.processes import process_title
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.names import source_line

PLACE = 70
SHOWN = 15
TITLES = {"sites": "young objects by type and line", "types": "young objects by type"}


def section(analysis: RunAnalysis) -> Section | None:
    sampled = {
        process_title(key): _grid(f"{process_title(key)}: {TITLES[rows.level]}", rows.rows)
        for key, rows in analysis.culprits.items()
    }
    begun = [
        grid(
            ("line", "collections"),
            [(source_line(*_split(line)), cell(n, count)) for line, n in collector.triggers],
            f"{process_title(key)}: the lines in which collections began",
        )
        for key, collector in analysis.collectors.items()
        if collector.triggers
    ]
    level, core = analysis.run.header.probe.level, analysis.run.header.core.name
    asked = level in TITLES and analysis.run.header.source != "sim"
    if not sampled and not begun and not asked:
        return None
    lead = "The collector runs when enough young objects have survived. These are the objects and where they were made."
    if not sampled:
        lead = "The lines in which collections began. `--probe sites` shows which objects caused them."
    if not sampled and asked:
        came = sum(sum(collector.collections) for collector in analysis.collectors.values())
        lead = f"No objects were counted: {count(came)} collections came in all processes, too few for a sample. "
        lead += "A load of long answers has more (`-w seed-decode-short`)"
        lead += (
            "." if core == "stock" else "; kvtune's core leaves the collector little to do, stock vLLM more:"
        )
    return Section(
        "culprits",
        "What causes collections",
        lead,
        tables=(*sampled.values(), *begun),
        commands=(profile_line(analysis.run, "--probe", level, core="stock"),)
        if asked and not sampled
        else (),
    )


def _split(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return (file, int(number)) if number.isdigit() else (line, 0)


def _grid(title: str, rows: Sequence[Culprit]) -> Grid:
    cells = (
        {
            "type": row.type,
            Column("made in", folds=True, rank=1): source_line(row.file, row.line),
            "objects per step": cell(row.per_step, "{:,.3g}".format),
            "share": cell(row.share, percent),
            "counted": cell(row.count, count),
            "bytes": cell(row.bytes, size),
        }
        for row in rows[:SHOWN]
    )
    return grid_of(cells, title)
