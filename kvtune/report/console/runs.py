"""The list of runs on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from kvtune.analysis.figures import FIGURES
from kvtune.report.listing import ListedRun
from kvtune.terminal import Column, FittedTable, console

HITS, FIRST_TOKEN = FIGURES["prefix_cache.hit_rate"], FIGURES["ttft_ms.mean"]
PIPE_WIDTH = 240  # columns where there is no terminal: all are shown


def print_runs(runs: Sequence[ListedRun], names: Sequence[str]) -> None:
    """One row a run. `names`: what commands take instead of the file, such as `last~1`; or empty."""
    columns = [
        *([Column("run", right=False)] if names else []),
        Column("model", right=False, folds=True),
        Column("load", right=False, folds=True),
        Column("core", right=False),
        Column("when", right=False, rank=1),
        Column(HITS.short),
        Column(FIRST_TOKEN.short),
        Column("state", right=False, folds=True, least=10),
        Column("file", right=False, rank=3 if names else 0, folds=not names),
        Column("keys of the load", right=False, rank=4),
    ]
    rows = [[*names[at : at + 1], *_cells(run)] for at, run in enumerate(runs)]
    console(PIPE_WIDTH).print(FittedTable(columns, rows, gap=2))


def _cells(run: ListedRun) -> tuple[str, ...]:
    where = f" ({run.source})" if run.source != "engine" else ""
    return (
        Path(run.model).name,
        run.workload,
        f"{run.core}{where}",
        _when(run.started_at),
        HITS.text(run.hit_rate),
        FIRST_TOKEN.text(run.ttft_ms_mean),
        _state(run),
        run.file,
        run.spec.partition(":")[2],
    )


def _state(run: ListedRun) -> str:
    """`unreadable: WHY`, with the last part of the message, which does not repeat the file's name."""
    return f"unreadable: {run.why.rpartition(': ')[2]}" if run.state == "unreadable" else run.state


def _when(started_at: str) -> str:
    """Local time; without the year in this year."""
    try:
        at = datetime.fromisoformat(started_at).astimezone()
    except ValueError:
        return "–"
    return f"{at:%m-%d %H:%M}" if at.year == datetime.now().year else f"{at:%Y-%m-%d}"
