"""Sampled stacks of EngineCore and the worker: the functions that their time was spent in, by self time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtune.report.charts import SERIES, Cell, Chart, Columns, Section, columns, grid, spec_of
from kvtune.report.names import process_title
from kvtune.run.types import Run

SHOWN = 12


def section(run: Run) -> Section | None:
    told = run.header.extra.get("stacks")
    if not isinstance(told, Mapping) or not told:
        return None
    charts: list[Chart] = []
    data: dict[str, Columns] = {}
    notes: list[str] = []
    for role, found in told.items():
        title = process_title(str(role))
        if not isinstance(found, Mapping) or not found.get("top"):
            why = found.get("failed", "no samples") if isinstance(found, Mapping) else "no samples"
            notes.append(f"{title}: {why}.")
            continue
        chart, rows = _functions(len(charts), title, found["top"], found.get("rate_hz", 0))
        charts.append(chart)
        data[chart.id] = rows
        notes.append(
            f"All stacks of {title} as a flame graph: open {found.get('file', '')} in speedscope.app."
        )
    return Section(
        id="stacks",
        title="Stacks",
        lead="Functions by self time, in percent of all samples; waiting counts as time, too.",
        template="stacks.html",
        values={"notes": notes},
        charts=tuple(charts),
        data=data,
    )


def _functions(number: int, title: str, top: list[dict[str, Any]], rate_hz: int) -> tuple[Chart, Columns]:
    import altair as alt

    name = f"stacks-{number}"
    shown = top[:SHOWN]
    names = [f"{f.get('function', '')}" for f in shown]
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
    where = [f"{f.get('file', '')}:{f.get('line', 0)}" for f in shown]
    shares = [100 * float(f.get("share", 0)) for f in shown]
    rows = [
        (Cell(str(i + 1), i + 1), names[i], where[i], Cell(f"{shares[i]:.1f} %", shares[i]))
        for i in range(len(shown))
    ]
    label = (
        f"{len(shown)} functions with most self time, sampled {rate_hz} times a second. First: {names[0]}."
    )
    chart = Chart(
        name,
        f"{title}: where the time was spent",
        label,
        spec_of(drawing + labels),
        grid(("rank", "function", "where", "share of samples"), rows, title),
    )
    return chart, columns(rank=range(1, len(shown) + 1), function=names, where=where, share=shares)
