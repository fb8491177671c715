"""Latency: a table of means and percentiles, and histograms of first-token times and gaps between tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtune.base.units import count, ms
from kvtune.data.show.charts import SERIES, columns, spec_of
from kvtune.data.show.parts import Chart, Section, cell, grid
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.figures import TIMES
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.spread import Spread, Values

if TYPE_CHECKING:
    import altair as alt

PLACE = 10
BINS = 40
WIDE = 30.0  # largest divided by smallest value: above this the axis is logarithmic


def section(analysis: RunAnalysis) -> Section | None:
    times, per_request = analysis.latency, analysis.request_times
    spreads = {head: getattr(times, key) for key, (_, head, _) in TIMES.items() if hasattr(times, key)}
    spreads["sent later than planned"] = times.send_lag_ms
    rows = [_row(name, spread) for name, spread in spreads.items() if spread.mean is not None]
    if not rows:
        return None
    table = grid(
        ("time", "mean", Column("median", rank=1), "p99", Column("longest", rank=2), Column("of", rank=3)),
        rows,
    )
    return Section(
        id="latency",
        title="Latency",
        lead=f"{count(times.requests)} requests sent, {count(times.finished)} finished as asked. "
        "First-token and whole-request times count from sending."
        if times.requests
        else "By the server's own histogram, from the arrival of a request: the mean is exact.",
        tables=(table,),
        draw=lambda: (
            _histogram("ttft", "requests", per_request.ttft_ms, times.ttft_ms),
            _histogram("itl", "gaps", per_request.gap_ms, times.itl_ms),
        ),
        beside=True,
    )


def _mark(name: str, at_ms: float, y: int, left: bool) -> alt.LayerChart:
    """Draw a named line across the histogram. `y`: the name's height; close lines need different heights."""
    import altair as alt

    base = alt.Chart(alt.InlineData(values=[{"x": at_ms, "name": name}])).encode(x="x:Q")
    text = base.mark_text(
        color="var(--c-rule)", align="left" if left else "right", dx=4 if left else -4, y=y
    ).encode(text="name:N")
    return base.mark_rule(color="var(--c-rule)", strokeWidth=1.5) + text


def _row(name: str, spread: Spread) -> list[object]:
    times = (cell(value, ms) for value in (spread.mean, spread.p50, spread.p99, spread.max))
    return [name, *times, cell(spread.count, count)]


def _histogram(name: str, noun: str, values: Values, spread: Spread) -> Chart | None:
    import altair as alt

    finite, title = values[np.isfinite(values)], TIMES[f"{name}_ms"][0].capitalize()
    if len(finite) < 2 or spread.p50 is None or spread.p99 is None:
        return None
    low, high = float(finite.min()), float(finite.max())
    wide = low > 0 and high / low > WIDE
    edges = (
        np.geomspace(low, high, BINS + 1)
        if wide
        else np.linspace(low, high if high > low else low + 1, BINS + 1)
    )
    heights, edges = np.histogram(finite, edges)
    scale = alt.Scale(type="log", nice=False) if wide else alt.Scale(zero=False, nice=False)
    bars = (
        alt.Chart(alt.NamedData(name=name), height=170)
        .mark_bar(orient="vertical", color=SERIES[0])
        .encode(
            x=alt.X("from:Q", scale=scale, title="milliseconds" + (" (logarithmic)" if wide else "")),
            x2="to:Q",
            y=alt.Y("n:Q", title=noun, axis=alt.Axis(tickCount=4, format="~s")),
            tooltip=[
                alt.Tooltip("from:Q", title="from (ms)", format=",.4~g"),
                alt.Tooltip("to:Q", title="to (ms)", format=",.4~g"),
                alt.Tooltip("n:Q", title=noun),
            ],
        )
    )
    near = edges[BINS // 5]  # left of this, a name does not fit on the left of its line
    rules = [
        _mark(name, value_ms, y, value_ms < near)
        for name, value_ms, y in (("median", spread.p50, 6), ("p99", spread.p99, 20))
    ]
    rows = [
        (f"{ms(a)} to {ms(b)}", int(n)) for a, b, n in zip(edges[:-1], edges[1:], heights, strict=True) if n
    ]
    label = (
        f"{count(len(finite))} {noun} from {ms(low)} to {ms(high)}; half of them below {ms(spread.p50)}, "
        f"99 of 100 below {ms(spread.p99)}."
    )
    data = columns(**{"from": edges[:-1], "to": edges[1:], "n": heights})
    table = grid(("time", noun), rows, title)
    return Chart(name, title, label, spec_of(alt.layer(bars, *rules)), table, {name: data})
