"""The figures of a comparison as a table and a chart, for page, terminal, Markdown and recipes."""

from __future__ import annotations

from collections.abc import Iterable

from kvtune.base.units import span
from kvtune.data.show.charts import columns, spec_of
from kvtune.data.show.parts import Cell, Chart, Grid, cell, grid
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.comparison.compare import ONE_RUN, Figure
from kvtune.reading.analysis.figures import quantity

COLORS = {"better": "var(--good)", "worse": "var(--bad)", "no difference shown": "var(--c8)"}
CSS = {"better": "better", "worse": "worse"}
DRIFT = "Times of one run a side are not judged: the machine's own drift between two runs can be as large."


def figure_table(first: str, other: str, figures: Iterable[Figure]) -> Grid:
    """Make a table with one row per figure. A narrow terminal drops the interval, because the verdict sums it up."""
    columns = (
        Column("figure", folds=True, least=22),
        *(Column(first), Column(other), Column("difference")),
        Column("95 % interval", right=False, rank=1),
        Column("verdict", right=False, folds=True, least=13),
    )
    rows = [
        (
            Cell(quantity(f.path).title, hint=quantity(f.path).meaning),
            *(cell(value, quantity(f.path).text) for value in (f.a, f.b)),
            Cell(change_text(f), f.relative),
            interval_text(f),
            Cell(f.verdict, css=CSS.get(f.verdict, "quiet")),
        )
        for f in figures
    ]
    return grid(columns, rows, f"{other} against {first}")


def in_points(figure: Figure) -> bool:
    """Whether the figure's differences are in percentage points, not relative."""
    return bool(quantity(figure.path).unit.of_difference)


def change_text(figure: Figure) -> str:
    """Return the difference, relative to the first run's value; absolute if that value is zero or a share."""
    if figure.relative is None or in_points(figure):
        return quantity(figure.path).text(figure.difference, signed=True)
    return f"{100 * figure.relative:+.1f} %"


def interval_text(figure: Figure) -> str:
    """Return the interval of the difference, or a dash if it has none (`figure.why` gives the reason)."""
    if figure.low is None or figure.high is None:
        return "–"
    ends = (figure.low, figure.high)
    if figure.a and not in_points(figure):
        return span(*(f"{100 * end / abs(figure.a):+.1f} %" for end in ends))
    return span(*(quantity(figure.path).text(end, signed=True) for end in ends))


def reasons(figures: Iterable[Figure]) -> list[str]:
    """Return the reasons why figures are not judged: one line per reason, with its figures."""
    titles_of: dict[str, list[str]] = {}
    for figure in figures:
        if figure.why:
            titles_of.setdefault(figure.why, []).append(quantity(figure.path).title)
    return [
        DRIFT if why == ONE_RUN else f"Not judged: {', '.join(titles)} ({why})."
        for why, titles in titles_of.items()
    ]


def judged(figure: Figure) -> bool:
    """Whether a chart can show the figure: it has an interval, in points or relative to the first side."""
    return figure.low is not None and figure.high is not None and (in_points(figure) or bool(figure.a))


def _drawn(figure: Figure, value: float | None) -> float:
    """Return a difference as a chart draws it: in percentage points, or in percent of the first side's value."""
    if in_points(figure):
        return quantity(figure.path).scaled(value or 0.0)
    return 100 * (value or 0.0) / abs(figure.a or 1.0)


def forest(number: int, first: str, other: str, figures: Iterable[Figure], *, points: bool) -> Chart | None:
    """Draw the figures that are judged in percentage points, or the others; None if there are none.

    Dots are differences, bars their intervals. `number`: the comparison's on its page.
    """
    import altair as alt

    rows = [f for f in figures if judged(f) and in_points(f) == points]
    if not rows:
        return None
    unit, name = ("percentage points", f"points-{number}") if points else ("%", f"figures-{number}")
    title, label = f"{other} against {first}", f"Dots are differences of {other} from {first}"
    base = alt.Chart(alt.NamedData(name=name), height=26 * len(rows) + 10).encode(
        y=alt.Y("of:N", sort=None, axis=alt.Axis(title="figure", labelLimit=190, titlePadding=8)),
        color=alt.Color(
            "verdict:N", title=None, scale=alt.Scale(domain=list(COLORS), range=list(COLORS.values()))
        ),
        tooltip=[
            alt.Tooltip("of:N", title="figure"),
            alt.Tooltip("text:N", title="difference"),
            alt.Tooltip("interval:N", title="95 % interval"),
            alt.Tooltip("verdict:N"),
        ],
    )
    low = alt.X("low:Q", title=f"difference of {other} from {first} ({unit})")
    bars = base.mark_rule(strokeWidth=5, opacity=0.45).encode(x=low, x2="high:Q")
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(x="change:Q")
    zero = alt.Chart(alt.InlineData(values=[{"x": 0}])).mark_rule(color="var(--ink)", strokeDash=[3, 3])
    titles, changes = [quantity(f.path).title for f in rows], [change_text(f) for f in rows]
    verdicts, intervals = [f.verdict for f in rows], [interval_text(f) for f in rows]
    data = columns(
        of=titles,
        low=[_drawn(f, f.low) for f in rows],
        high=[_drawn(f, f.high) for f in rows],
        change=[_drawn(f, f.difference) for f in rows],
        verdict=verdicts,
        text=changes,
        interval=intervals,
    )
    cells = [Cell(change, f.relative) for change, f in zip(changes, rows, strict=True)]
    heads = ("figure", "difference", "95 % interval", "verdict")
    table = grid(heads, zip(titles, cells, intervals, verdicts, strict=True), title)
    drawing = spec_of(zero.encode(x="x:Q") + bars + dots)
    return Chart(name, title, f"{label}, bars their 95 % intervals.", drawing, table, {name: data})
