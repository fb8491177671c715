"""The lanes of the timeline: what each one draws, and the function that makes its rows from a run.

A lane with too many rows draws only the smallest and largest of neighbouring values, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtune.base.units import count, ms
from kvtune.data.run.types import Run, Table
from kvtune.data.show.charts import GENERATION_COLORS, SERIES, columns, extremes, spec_of
from kvtune.data.show.parts import Chart, Columns, Grid
from kvtune.reading.report.names import process_name

if TYPE_CHECKING:
    import altair as alt

BUCKETS = 500
BINS = 120
FINE_BINS = 240
AXIS_EXTENT = 74  # pixels, the same for all lanes; page.js relies on their common left edge
FROM, TO = "from_s", "to_s"
"""Parameters of the drawing that page.js sets: the time that all lanes show."""

MARKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "points": ("circle", {"size": 14, "opacity": 0.75}),
    "bars": ("bar", {"orient": "vertical"}),
    "spans": ("rule", {"strokeWidth": 9, "strokeCap": "square"}),
    "line": ("line", {"strokeWidth": 1.5}),
    "stairs": ("line", {"interpolate": "step-after", "strokeWidth": 1.3}),
    "area": ("area", {"interpolate": "step-after", "opacity": 0.6, "color": SERIES[4]}),
}
"""Vega-Lite's mark and its properties, for each `Lane.mark`."""
AT = {"t": "time (s)"}
SPAN = {"t": "from (s)", "until": "until (s)"}
LINES: Mapping[str, Any] = {
    "y": "value",
    "axis": "",
    "format": ",.4~g",
    "color": "process",
    "tips": {**AT, "process": "process", "value": ""},
}
TOKENS: Mapping[str, Any] = {
    "y": "tokens",
    "axis": "tokens",
    "mark": "bars",
    "color": "what",
    "tips": {**SPAN, "what": "", "tokens": "tokens"},
}
POOL: Mapping[str, Any] = {"y": "used", "axis": "% of pool", "mark": "area", "format": ",.3~g"}
GPU: Mapping[str, Any] = {**LINES, "tips": {**AT, "process": "GPU", "value": ""}}
EVICTED: Mapping[str, Any] = {
    "y": "blocks",
    "axis": "blocks",
    "mark": "bars",
    "color": "queue",
    "tips": {**SPAN, "queue": "queue", "blocks": "blocks"},
}


@dataclass(frozen=True, slots=True)
class Rows:
    """One lane's rows from a run. `colors`: a colour for each word in the column `Lane.color`, as in the legend."""

    data: Columns
    colors: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    each: str = ""  # the length of a bar as text, such as `500 ms`
    unit: str = ""  # of the axis, if it depends on the run
    largest: float = 0.0  # value of the largest circle


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane. `y`, `color`, `size`: columns of its rows. `{}` in the title: `Rows.each`. `axis` "": `Rows.unit`."""

    name: str
    title: str
    height: int
    rows: Callable[[Run, float], Rows | None]
    y: str
    axis: str
    mark: str = "line"
    format: str = "~s"
    color: str = ""
    size: str = ""
    tips: Mapping[str, str] = field(default_factory=dict)

    def drawing(self, rows: Rows) -> alt.Chart:
        import altair as alt

        words = _has_words(rows.data, self.y)  # one line for each process or GPU
        height = self.height * len(set(rows.data[self.y])) + 14 if words else self.height
        base = alt.Chart(alt.NamedData(name=self.name), title=self.title.format(rows.each), height=height)
        encoded: dict[str, Any] = {"x": _x()}
        if words:
            axis = _axis(labelLimit=AXIS_EXTENT - 2)
            encoded["y"] = alt.Y(f"{self.y}:N", title=self.axis, axis=axis)
        else:
            encoded["y"] = alt.Y(
                f"{self.y}:Q",
                title=self.axis or rows.unit,
                axis=_axis(tickCount=3, format=self.format),
                stack=True if rows.each else None,
                scale=alt.Scale(nice=True),
            )
        if rows.each:
            encoded["x2"] = "until:Q"
        if self.color:
            scale = alt.Scale(domain=list(rows.colors), range=list(rows.colors.values()))
            encoded["color"] = alt.Color(f"{self.color}:N", scale=scale, title=None)
        if self.size:
            scale = alt.Scale(domain=[0, rows.largest], range=[6, 420])
            encoded["size"] = alt.Size(f"{self.size}:Q", scale=scale, legend=None)
        if self.tips:
            encoded["tooltip"] = [
                _tip(name, title or rows.unit, rows.data) for name, title in self.tips.items()
            ]
        kind, style = MARKS[self.mark]
        marked: alt.Chart = getattr(base, f"mark_{kind}")(clip=True, **style)
        return marked.encode(**encoded)


Drawn = Sequence[tuple[Lane, Rows]]


def drawn_lanes(lanes: Sequence[Lane], run: Run, end_s: float) -> Drawn:
    """Return the lanes of which the run has rows, with these."""
    return [(lane, rows) for lane in lanes if (rows := lane.rows(run, end_s)) is not None]


def lanes_chart(
    id: str, title: str, recording: str, lanes: Drawn, end_s: float, table: Grid, note: str
) -> Chart:
    """Draw the lanes below each other, on one time axis from 0 to `end_s`; the lowest lane has its title.

    `recording`: what a server's recording is called; "" for a run.
    """
    import altair as alt

    drawings = [lane.drawing(rows) for lane, rows in lanes]
    drawings[-1].encoding["x"]["axis"]["title"] = f"time since {recording or 'measuring'} began (s)"
    stacked = alt.vconcat(*drawings, spacing=12).resolve_scale(color="independent", size="independent")
    stacked = stacked.add_params(alt.param(name=FROM, value=0), alt.param(name=TO, value=end_s))
    whole = f"whole {recording.removeprefix('the ') or 'run'}"
    return Chart(
        id,
        title,
        f"{len(lanes)} lanes over {end_s:.3g} s. Drag across a lane to zoom in, double-click for the {whole}; on the "
        "keyboard + and -, arrow keys, 0.",
        spec_of(stacked),
        table,
        {lane.name: rows.data for lane, rows in lanes},
        note,
        zoom=end_s,
    )


def _steps(run: Run, end_s: float) -> Rows | None:
    steps = run.table("steps")
    if not len(steps["t_s"]):
        return None
    keep = extremes(steps["step_us"], BUCKETS)
    data = columns(
        t=steps["t_s"][keep],
        ms=steps["step_us"][keep] / 1000,
        kind=np.where(steps["prefill_tokens"][keep] > 0, "with prefill", "decode only"),
        tokens=steps["scheduled_tokens"][keep],
        requests=steps["requests"][keep],
    )
    return Rows(data, _series("decode only", "with prefill"), _thinned(keep, steps, "steps"))


def _collections(run: Run, end_s: float) -> Rows | None:
    gc = run.table("gc")
    if not len(gc["t_s"]):
        return None
    young = gc["generation"] == 0
    keep = np.flatnonzero(~young)
    if len(keep) > 2 * BUCKETS:
        keep = keep[extremes(gc["pause_us"][keep], BUCKETS)]
    rows = np.flatnonzero(young)
    if len(rows):
        rows = rows[extremes(gc["pause_us"][rows], BUCKETS)]
    keep = np.sort(np.concatenate((keep, rows)))
    processes = gc["process"][keep].tolist()
    title = {process: process_name(run, process) for process in set(processes)}
    data = columns(
        t=gc["t_s"][keep],
        process=[title[process] for process in processes],
        ms=gc["pause_us"][keep] / 1000,
        generation=[f"generation {g}" for g in gc["generation"][keep]],
    )
    generations = sorted(set(gc["generation"].tolist()))
    colors = {f"generation {g}": GENERATION_COLORS[min(int(g), 2)] for g in generations}
    # The largest circle stands for at least 10 ms, so that short pauses have small circles.
    largest_ms = max(10.0, float(gc["pause_us"].max()) / 1000)
    return Rows(data, colors, _thinned(keep, gc, "collections"), largest=largest_ms)


def _requests(run: Run, end_s: float) -> Rows | None:
    steps = run.table("steps")
    if not len(steps["t_s"]):
        return None
    keep = extremes(steps["running"] + steps["waiting"], BUCKETS)
    data = columns(
        t=np.tile(steps["t_s"][keep], 2),
        n=np.concatenate((steps["running"][keep], steps["waiting"][keep])),
        state=["running"] * len(keep) + ["waiting"] * len(keep),
    )
    return Rows(data, _series("running", "waiting"), _thinned(keep, steps, "steps"))


def _hits(run: Run, end_s: float) -> Rows | None:
    requests = run.table("requests")
    counted = (requests["hit_tokens"] >= 0) & np.isfinite(requests["sent_s"])
    if not counted.any():
        return None
    edges = np.linspace(0, end_s, BINS + 1)
    sent, hit = requests["sent_s"][counted], requests["hit_tokens"][counted]
    hits, _ = np.histogram(sent, edges, weights=hit)
    computed, _ = np.histogram(sent, edges, weights=requests["prompt_tokens"][counted] - hit)
    data = columns(
        t=np.tile(edges[:-1], 2),
        until=np.tile(edges[1:], 2),
        tokens=np.concatenate((hits, computed)),
        what=["hit"] * BINS + ["computed"] * BINS,
    )
    return Rows(data, {"hit": "var(--c-hit)", "computed": "var(--c-miss)"}, each=ms(1000 * end_s / BINS))


def _blocks(run: Run, end_s: float) -> Rows | None:
    steps, blocks = run.table("steps"), run.header.engine.num_blocks
    if not len(steps["t_s"]) or not blocks or not (steps["free_blocks"] >= 0).any():
        return None
    used = 100 * (1 - np.clip(steps["free_blocks"] / blocks, 0, 1))
    keep = extremes(used, BUCKETS)
    return Rows(columns(t=steps["t_s"][keep], used=used[keep]), note=_thinned(keep, steps, "steps"))


def _evicted(run: Run, end_s: float) -> Rows | None:
    """Make bars of the blocks evicted per span of time, stacked by the eviction queue that they were in."""
    pool = run.table("pool")
    if not pool["evicted"].any():
        return None
    edges = np.linspace(0, end_s, FINE_BINS + 1)
    by_queue = {}
    for queue in sorted(set(pool["tier"][pool["evicted"] > 0].tolist())):
        own = pool["tier"] == queue
        counts, _ = np.histogram(pool["t_s"][own], edges, weights=pool["evicted"][own])
        by_queue[_queue_name(run, queue)] = counts
    places = {name: np.flatnonzero(counts) for name, counts in by_queue.items()}
    data = columns(
        t=np.concatenate([edges[:-1][rows] for rows in places.values()]),
        until=np.concatenate([edges[1:][rows] for rows in places.values()]),
        queue=[name for name, rows in places.items() for _ in rows],
        blocks=np.concatenate([by_queue[name][rows] for name, rows in places.items()]),
    )
    return Rows(data, _series(*by_queue), each=ms(1000 * end_s / FINE_BINS))


def _queue_name(run: Run, number: int) -> str:
    names = run.header.engine.settings.get("tiers")
    if isinstance(names, list) and 0 <= number < len(names):
        return str(names[number])
    return f"queue {number + 1}"


def _rss(run: Run, end_s: float) -> Rows | None:
    memory = run.table("memory")
    if not len(memory["t_s"]):
        return None
    in_gib = int(memory["rss_bytes"].max()) >= 2**31
    unit, unit_bytes = ("GiB", 2**30) if in_gib else ("MiB", 2**20)
    return _lines(memory, "process", memory["rss_bytes"] / unit_bytes, lambda n: process_name(run, n), unit)


def _gpu(column: str, unit: str, scale: float = 1.0) -> Callable[[Run, float], Rows | None]:
    """Return a function that makes a line for each GPU that NVML sampled."""

    def rows(run: Run, end_s: float) -> Rows | None:
        table, names = run.table("devices"), run.header.extra.devices
        if not len(table["t_s"]):
            return None

        def title(number: int) -> str:
            return f"{number}: {names[number] if number < len(names) else 'GPU'}"

        return _lines(table, "device", table[column] / scale, title, unit)

    return rows


def _lines(table: Table, column: str, values: NDArray[Any], title: Callable[[int], str], unit: str) -> Rows:
    """Make a line for each number in the column `column`, which numbers processes or GPUs."""
    t, value, names = [], [], []
    for number in np.unique(table[column]).tolist():
        rows = np.flatnonzero(table[column] == number)
        rows = rows[extremes(values[rows], BUCKETS // 2)]
        t += table["t_s"][rows].tolist()
        value += values[rows].tolist()
        names += [title(number)] * len(rows)
    return Rows(columns(t=t, value=value, process=names), _series(*dict.fromkeys(names)), unit=unit)


def _series(*names: str) -> dict[str, str]:
    return {name: SERIES[number % len(SERIES)] for number, name in enumerate(names)}


def _thinned(keep: NDArray[np.int64], table: Table, noun: str) -> str:
    drawn, total = len(keep), len(table["t_s"])
    if drawn == total:
        return ""
    return (
        f"Of {count(total)} {noun}, {count(drawn)} are drawn: the extremes of neighbours, so no peak is lost."
    )


def _x() -> alt.X:
    import altair as alt

    shown = {"domainMin": alt.ExprRef(FROM), "domainMax": alt.ExprRef(TO)}
    scale = alt.Scale(**shown, nice=False, zero=False, padding=0)
    return alt.X("t:Q", scale=scale, axis=alt.Axis(title=None, tickCount=8))


def _axis(**more: str | int) -> alt.Axis:
    import altair as alt

    return alt.Axis(minExtent=AXIS_EXTENT, maxExtent=AXIS_EXTENT, **more)


def _has_words(data: Columns, name: str) -> bool:
    return any(isinstance(value, str) for value in data[name][:1])


def _tip(name: str, title: str, data: Columns) -> alt.Tooltip:
    import altair as alt

    if _has_words(data, name):
        return alt.Tooltip(name, type="nominal", title=title or name)
    return alt.Tooltip(name, type="quantitative", title=title or name, format=",.5~g")


LANES = (
    Lane(
        "steps",
        "Step time",
        110,
        _steps,
        y="ms",
        axis="step (ms)",
        mark="points",
        color="kind",
        tips={**AT, "ms": "step (ms)", "kind": "", "tokens": "tokens", "requests": "requests"},
    ),
    Lane(
        "gc",
        "Collections (area = pause)",
        26,
        _collections,
        y="process",
        axis="process",
        mark="points",
        color="generation",
        size="ms",
        tips={**AT, "process": "process", "ms": "pause (ms)", "generation": ""},
    ),
    Lane("queue", "Requests", 70, _requests, y="n", axis="requests", mark="stairs", color="state"),
    Lane("hits", "Prompt tokens sent in {} each", 70, _hits, **TOKENS),
    Lane("blocks", "KV blocks held by requests", 60, _blocks, **POOL),
    Lane("evicted", "KV blocks evicted in {} each, by the queue they were in", 60, _evicted, **EVICTED),
    Lane("gpu_busy", "GPU busy", 60, _gpu("busy_percent", "%"), **GPU),
    Lane("gpu_power", "GPU power", 60, _gpu("power_w", "W"), **GPU),
    Lane("gpu_memory", "GPU memory", 60, _gpu("memory_bytes", "GiB", 2**30), **GPU),
    Lane("rss", "Resident memory (RSS)", 80, _rss, **LINES),
)
"""The lanes from top to bottom."""
