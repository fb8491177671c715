"""Sampled stacks of EngineCore and the worker: functions by self time, and a flame graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from kvtune.base.units import percent
from kvtune.data.run.extras import FlameBox, StackFunction, StackSamples
from kvtune.data.show.charts import SERIES, columns, spec_of
from kvtune.data.show.parts import Cell, Chart, Grid, Section, cell, grid, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.processes import process_title
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.names import source_line

PLACE = 100
SHOWN = 12


def section(analysis: RunAnalysis) -> Section | None:
    sampled = analysis.run.header.extra.stacks
    if not sampled:
        return None
    titled = {process_title(role): samples for role, samples in sampled.items()}
    tables = {title: _table(title, samples.top) for title, samples in titled.items() if samples.top}
    loops = all(samples.threads == "loop" for samples in sampled.values())
    return Section(
        id="stacks",
        title="Stacks",
        lead="Functions by self time, in percent of all samples, samples of waiting included."
        + (" Only the threads that run the engine's loops; the others wait." if loops else ""),
        notes=tuple(
            f"All stacks of {title} in full: open {samples.file} in speedscope.app."
            if samples.top
            else f"{title}: {samples.failed or 'no samples'}."
            for title, samples in titled.items()
        ),
        draw=lambda: _charts(titled, tables),
        tables=tuple(tables.values()),
    )


def _charts(titled: Mapping[str, StackSamples], tables: Mapping[str, Grid]) -> Iterator[Chart]:
    numbers = itertools.count()
    for title, table in tables.items():
        samples = titled[title]
        yield _functions(next(numbers), title, samples.top, samples.rate_hz, table)
        if samples.flame:
            yield _flame(next(numbers), title, samples.flame)


def _table(title: str, top: Sequence[StackFunction]) -> Grid:
    rows = (
        {
            "rank": cell(rank, str),
            Column("function", right=False, folds=True): f.function,
            Column("where", right=False, folds=True, rank=1): source_line(f.file, f.line),
            "share of samples": cell(f.share, percent),
        }
        for rank, f in enumerate(top[:SHOWN], start=1)
    )
    return grid_of(rows, title)


def _functions(number: int, title: str, top: list[StackFunction], rate_hz: int, table: Grid) -> Chart:
    import altair as alt

    name = f"stacks-{number}"
    shown = top[:SHOWN]
    names = [f.function for f in shown]
    drawing = (
        alt.Chart(alt.NamedData(name=name), height=22 * len(shown) + 10)
        .mark_bar(color=SERIES[4])
        .encode(
            y=alt.Y("rank:O", axis=alt.Axis(title="rank of the function", labelLimit=40)),
            x=alt.X("share:Q", title="share of samples (%)"),
            tooltip=[
                alt.Tooltip("function:N"),
                alt.Tooltip("where:N"),
                alt.Tooltip("share:Q", title="share (%)", format=".1f"),
            ],
        )
    )
    labels = drawing.mark_text(align="left", dx=4, color="var(--ink)").encode(text="function:N")
    where = [source_line(f.file, f.line) for f in shown]
    shares = [100 * f.share for f in shown]
    label = (
        f"{len(shown)} functions with most self time, sampled {rate_hz} times a second. First: {names[0]}."
    )
    return Chart(
        name,
        f"{title}: where the time was spent",
        label,
        spec_of(drawing + labels),
        table,
        {name: columns(rank=range(1, len(shown) + 1), function=names, where=where, share=shares)},
    )


def _flame(number: int, title: str, boxes: list[FlameBox]) -> Chart:
    """Draw a flame graph with callers above the functions they call. Width: share of samples."""
    import altair as alt

    name = f"stacks-{number}"
    depth, start, share, function, file, line = zip(*boxes, strict=True)
    where = [source_line(f, n) for f, n in zip(file, line, strict=True)]
    short = [text if part > 0.03 else "" for text, part in zip(function, share, strict=True)]
    data = columns(
        depth=depth,
        below=[d + 0.94 for d in depth],
        start=[100 * s for s in start],
        end=[100 * (s + w) for s, w in zip(start, share, strict=True)],
        share=[100 * w for w in share],
        function=function,
        where=where,
        short=short,
        tone=[d % 3 for d in depth],
    )
    deepest = max(depth) + 1
    down = alt.Scale(domain=[0, deepest], reverse=True, nice=False)
    base = alt.Chart(alt.NamedData(name=name), height=17 * deepest + 10).encode(
        x=alt.X(
            "start:Q",
            title="share of samples (%)",
            scale=alt.Scale(domain=[0, 100], nice=False),
            axis=alt.Axis(grid=False),
        ),
        y=alt.Y("depth:Q", title="depth of the stack", scale=down, axis=alt.Axis(grid=False, tickMinStep=1)),
    )
    tips = [
        alt.Tooltip("function:N"),
        alt.Tooltip("where:N"),
        alt.Tooltip("share:Q", title="share (%)", format=".1f"),
    ]
    tones = alt.Scale(domain=[0, 1, 2], range=[0.25, 0.38, 0.5])
    box = base.mark_rect(color=SERIES[1], stroke="var(--paper)", strokeWidth=0.7).encode(
        x2="end:Q",
        y2="below:Q",
        fillOpacity=alt.FillOpacity("tone:Q", scale=tones, legend=None),
        tooltip=tips,
    )
    text = base.mark_text(
        align="left",
        baseline="top",
        dx=2,
        dy=3,
        color="var(--ink)",
        fontSize=10.5,
        limit=alt.ExprRef("width * datum.share / 100 - 4"),
    )
    text = text.encode(text="short:N").transform_filter("datum.short != ''")
    rows = [
        (cell(d, str), f, w, Cell(f"{100 * p:.1f} %", 100 * p))
        for d, f, w, p in zip(depth, function, where, share, strict=True)
    ]
    inner = [i for i in range(len(boxes)) if depth[i] == deepest - 1]
    label = f"{len(boxes)} boxes in {deepest} levels, callers above what they call. Deepest: {function[inner[0]]}."
    return Chart(
        name,
        f"{title}: flame graph",
        label,
        spec_of(alt.layer(box, text)),
        grid(("depth", "function", "where", "share of samples"), rows, f"{title}, by depth"),
        {name: data},
    )
