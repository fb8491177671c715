"""The figures of a comparison as a table: once, for page, terminal, Markdown and recipes."""

from __future__ import annotations

from collections.abc import Iterable

from kvtune.analysis.comparison.compare import ONE_RUN, Figure
from kvtune.analysis.figures import quantity
from kvtune.report.parts import Cell, Grid, cell, grid
from kvtune.terminal import Column

CSS = {"better": "better", "worse": "worse"}
DRIFT = "Times of one run a side are not judged: the machine's own drift between two runs can be as large."


def figure_table(first: str, other: str, figures: Iterable[Figure]) -> Grid:
    """A row a figure. A narrow terminal leaves the interval out, as the verdict says what it shows."""
    columns = (
        Column("figure", folds=True, least=22),
        *(Column(first), Column(other), Column("difference")),
        Column("95 % interval", right=False, rank=1),
        Column("verdict", right=False, folds=True, least=13),
    )
    rows = [
        (
            quantity(f.path).title,
            *(cell(value, quantity(f.path).text) for value in (f.a, f.b)),
            Cell(change_text(f), f.relative),
            interval_text(f),
            Cell(f.verdict, css=CSS.get(f.verdict, "quiet")),
        )
        for f in figures
    ]
    return grid(columns, rows, f"{other} against {first}")


def in_points(figure: Figure) -> bool:
    """Whether its differences are percentage points, not percent of percent."""
    return bool(quantity(figure.path).unit.of_difference)


def change_text(figure: Figure) -> str:
    """The difference relative to the first run's value, or absolute if that value is zero or a share."""
    if figure.relative is None or in_points(figure):
        return quantity(figure.path).text(figure.difference, signed=True)
    return f"{100 * figure.relative:+.1f} %"


def interval_text(figure: Figure) -> str:
    """The interval of the difference; a dash where there is none (`figure.why` says why)."""
    if figure.low is None or figure.high is None:
        return "–"
    ends = (figure.low, figure.high)
    if figure.a and not in_points(figure):
        return " to ".join(f"{100 * end / abs(figure.a):+.1f} %" for end in ends)
    return " to ".join(quantity(figure.path).text(end, signed=True) for end in ends)


def reasons(figures: Iterable[Figure]) -> list[str]:
    """Why figures are not judged: one line per reason, with its figures."""
    titles_of: dict[str, list[str]] = {}
    for figure in figures:
        if figure.why:
            titles_of.setdefault(figure.why, []).append(quantity(figure.path).title)
    return [
        DRIFT if why == ONE_RUN else f"Not judged: {', '.join(titles)} ({why})."
        for why, titles in titles_of.items()
    ]
