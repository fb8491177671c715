"""The lanes of the timeline, one function each: a lane, or None where its table was not recorded.

Long runs are thinned to the extremes of neighbours, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtune.report.charts import GENERATION_COLORS, SERIES, Columns, columns, extremes
from kvtune.report.names import process_name
from kvtune.run.types import Run
from kvtune.units import count, ms

if TYPE_CHECKING:
    import altair as alt

BUCKETS = 500
BINS = 120
FINE_BINS = 240
WORDS = ("kind", "generation", "process", "what", "state", "queue")  # columns that hold words, not numbers
AXIS_EXTENT = 74  # page.js relies on it: all lanes have the same left edge


@dataclass(frozen=True, slots=True)
class Lane:
    drawing: alt.Chart
    name: str
    data: Columns
    note: str = ""


def _steps(run: Run, end_s: float) -> Lane | None:
    import altair as alt

    steps = run.table("steps")
    if not len(steps["t_s"]):
        return None
    keep = extremes(steps["step_us"], BUCKETS)
    kind = np.where(steps["prefill_tokens"][keep] > 0, "with prefill", "decode only")
    data = columns(
        t=steps["t_s"][keep],
        ms=steps["step_us"][keep] / 1000,
        kind=kind,
        tokens=steps["scheduled_tokens"][keep],
        requests=steps["requests"][keep],
    )
    drawing = _lane("steps", "Step time", 110).mark_circle(size=14, opacity=0.75, clip=True).encode(
        x=_x(),
        y=_y("ms:Q", "step (ms)"),
        color=alt.Color("kind:N", scale=_colors(("decode only", "with prefill"), SERIES), title=None),
        tooltip=_tips(t="time (s)", ms="step (ms)", kind="", tokens="tokens", requests="requests"),
    )  # fmt: skip
    return Lane(drawing, "steps", data, _thinned(len(keep), len(steps["t_s"]), "steps"))


def _collections(run: Run, end_s: float) -> Lane | None:
    import altair as alt

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
    names = [title[process] for process in processes]
    data = columns(
        t=gc["t_s"][keep],
        process=names,
        ms=gc["pause_us"][keep] / 1000,
        generation=[f"generation {g}" for g in gc["generation"][keep]],
    )
    generations = tuple(f"generation {g}" for g in sorted(set(gc["generation"].tolist())))
    colors = tuple(GENERATION_COLORS[min(int(g[-1]), 2)] for g in generations)
    # The largest circle means at least 10 ms, so that runs with short pauses have small circles.
    largest_ms = max(10.0, float(gc["pause_us"].max()) / 1000)
    drawing = _lane("gc", "Collections (area = pause)", 26 * len(set(names)) + 14).mark_circle(
        opacity=0.75, clip=True
    ).encode(
        x=_x(),
        y=alt.Y("process:N", title="process", axis=_axis(labelLimit=AXIS_EXTENT - 2)),
        size=alt.Size("ms:Q", scale=alt.Scale(domain=[0, largest_ms], range=[6, 420]), legend=None),
        color=alt.Color("generation:N", scale=_colors(generations, colors), title=None),
        tooltip=_tips(t="time (s)", process="process", ms="pause (ms)", generation=""),
    )  # fmt: skip
    return Lane(drawing, "gc", data, _thinned(len(keep), len(gc["t_s"]), "collections"))


def _requests(run: Run, end_s: float) -> Lane | None:
    import altair as alt

    steps = run.table("steps")
    if not len(steps["t_s"]):
        return None
    keep = extremes(steps["running"] + steps["waiting"], BUCKETS)
    t = np.concatenate((steps["t_s"][keep], steps["t_s"][keep]))
    number = np.concatenate((steps["running"][keep], steps["waiting"][keep]))
    state = ["running"] * len(keep) + ["waiting"] * len(keep)
    lane = _lane("queue", "Requests", 70).mark_line(interpolate="step-after", strokeWidth=1.3, clip=True)
    drawing = lane.encode(
        x=_x(),
        y=_y("n:Q", "requests"),
        color=alt.Color("state:N", scale=_colors(("running", "waiting"), SERIES), title=None),
    )  # fmt: skip
    data = columns(t=t, n=number, state=state)
    return Lane(drawing, "queue", data, _thinned(len(keep), len(steps["t_s"]), "steps"))


def _hits(run: Run, end_s: float) -> Lane | None:
    import altair as alt

    requests = run.table("requests")
    known = (requests["hit_tokens"] >= 0) & np.isfinite(requests["sent_s"])
    if not known.any():
        return None
    edges = np.linspace(0, end_s, BINS + 1)
    sent, hit = requests["sent_s"][known], requests["hit_tokens"][known]
    hits, _ = np.histogram(sent, edges, weights=hit)
    computed, _ = np.histogram(sent, edges, weights=requests["prompt_tokens"][known] - hit)
    data = columns(
        t=np.tile(edges[:-1], 2),
        until=np.tile(edges[1:], 2),
        tokens=np.concatenate((hits, computed)),
        what=["hit"] * BINS + ["computed"] * BINS,
    )
    colors = _colors(("hit", "computed"), ("var(--c-hit)", "var(--c-miss)"))
    lane = _lane("hits", f"Prompt tokens sent in {ms(1000 * end_s / BINS)} each", 70)
    drawing = lane.mark_bar(clip=True, orient="vertical").encode(
        x=_x(),
        x2="until:Q",
        y=_y("tokens:Q", "tokens", stack=True),
        color=alt.Color("what:N", scale=colors, title=None),
        tooltip=_tips(t="from (s)", until="until (s)", what="", tokens="tokens"),
    )  # fmt: skip
    return Lane(drawing, "hits", data)


def _blocks(run: Run, end_s: float) -> Lane | None:
    steps, blocks = run.table("steps"), run.header.engine.num_blocks
    if not len(steps["t_s"]) or not blocks or not (steps["free_blocks"] >= 0).any():
        return None
    used = 100 * (1 - np.clip(steps["free_blocks"] / blocks, 0, 1))
    keep = extremes(used, BUCKETS)
    drawing = _lane("blocks", "KV blocks held by requests", 60).mark_area(
        interpolate="step-after", opacity=0.6, clip=True, color=SERIES[4]
    ).encode(x=_x(), y=_y("used:Q", "% of pool", format=",.3~g"))  # fmt: skip
    data = columns(t=steps["t_s"][keep], used=used[keep])
    return Lane(drawing, "blocks", data, _thinned(len(keep), len(steps["t_s"]), "steps"))


def _evictions(run: Run, end_s: float) -> Lane | None:
    return _moved(run, end_s, "evicted", "KV blocks evicted")


def _demotions(run: Run, end_s: float) -> Lane | None:
    return _moved(run, end_s, "demoted", "KV blocks demoted to a lower queue")


def _moved(run: Run, end_s: float, column: str, title: str) -> Lane | None:
    """Bars by span of time, stacked by the queue that the blocks were in."""
    import altair as alt

    pool = run.table("pool")
    if not pool[column].any():
        return None
    edges = np.linspace(0, end_s, FINE_BINS + 1)
    by_queue = {}
    for queue in sorted(set(pool["tier"][pool[column] > 0].tolist())):
        of_queue = pool["tier"] == queue
        weights = pool[column][of_queue]
        by_queue[_queue_name(run, queue)] = np.histogram(pool["t_s"][of_queue], edges, weights=weights)[0]
    at = {name: np.flatnonzero(counts) for name, counts in by_queue.items()}
    data = columns(
        t=np.concatenate([edges[:-1][rows] for rows in at.values()]),
        until=np.concatenate([edges[1:][rows] for rows in at.values()]),
        queue=[name for name, rows in at.items() for _ in rows],
        blocks=np.concatenate([by_queue[name][rows] for name, rows in at.items()]),
    )
    drawing = (
        _lane(column, f"{title} in {ms(1000 * end_s / FINE_BINS)} each, by the queue they were in", 60)
        .mark_bar(clip=True, orient="vertical")
        .encode(
            x=_x(),
            x2="until:Q",
            y=_y("blocks:Q", "blocks", stack=True),
            color=alt.Color("queue:N", scale=_colors(tuple(by_queue), SERIES), title=None),
            tooltip=_tips(t="from (s)", until="until (s)", queue="queue", blocks="blocks"),
        )
    )
    return Lane(drawing, column, data)


def _queue_name(run: Run, number: int) -> str:
    names = run.header.engine.settings.get("tiers")
    if isinstance(names, list) and 0 <= number < len(names):
        return str(names[number])
    return f"queue {number + 1}"


def _rss(run: Run, end_s: float) -> Lane | None:
    import altair as alt

    memory = run.table("memory")
    if not len(memory["t_s"]):
        return None
    in_gib = int(memory["rss_bytes"].max()) >= 2**31
    unit, unit_bytes = ("GiB", 2**30) if in_gib else ("MiB", 2**20)
    t, rss, names = [], [], []
    for process in sorted(set(memory["process"].tolist())):
        rows = np.flatnonzero(memory["process"] == process)
        rows = rows[extremes(memory["rss_bytes"][rows], BUCKETS // 2)]
        t += memory["t_s"][rows].tolist()
        rss += (memory["rss_bytes"][rows] / unit_bytes).tolist()
        names += [process_name(run, process)] * len(rows)
    order = tuple(dict.fromkeys(names))
    drawing = _lane("rss", "Resident memory (RSS)", 80).mark_line(strokeWidth=1.6, clip=True).encode(
        x=_x(),
        y=_y("rss:Q", unit, format=",.4~g"),
        color=alt.Color("process:N", scale=_colors(order, SERIES), title=None),
        tooltip=_tips(t="time (s)", process="process", rss=unit),
    )  # fmt: skip
    return Lane(drawing, "rss", columns(t=t, rss=rss, process=names))


def _gpu_busy(run: Run, end_s: float) -> Lane | None:
    return _gpu(run, "gpu_busy", "GPU busy", run.table("devices")["busy_percent"], "%")


def _gpu_power(run: Run, end_s: float) -> Lane | None:
    return _gpu(run, "gpu_power", "GPU power", run.table("devices")["power_w"], "W")


def _gpu_memory(run: Run, end_s: float) -> Lane | None:
    return _gpu(run, "gpu_memory", "GPU memory", run.table("devices")["memory_bytes"] / 2**30, "GiB")


def _gpu(run: Run, name: str, title: str, values: NDArray[Any], unit: str) -> Lane | None:
    """A line for each GPU that NVML sampled."""
    import altair as alt

    table, names = run.table("devices"), run.header.extra.devices
    if not len(table["t_s"]):
        return None
    t, value, device = [], [], []
    for number in np.unique(table["device"]).tolist():
        rows = np.flatnonzero(table["device"] == number)
        rows = rows[extremes(values[rows], BUCKETS // 2)]
        t += table["t_s"][rows].tolist()
        value += values[rows].tolist()
        named = names[number] if number < len(names) else "GPU"
        device += [f"{number}: {named}"] * len(rows)
    drawing = _lane(name, title, 60).mark_line(strokeWidth=1.4, clip=True).encode(
        x=_x(),
        y=_y("value:Q", unit, format=",.4~g"),
        color=alt.Color("process:N", scale=_colors(tuple(dict.fromkeys(device)), SERIES), title=None),
        tooltip=_tips(t="time (s)", process="GPU", value=unit),
    )  # fmt: skip
    return Lane(drawing, name, columns(t=t, value=value, process=device))


def _lane(name: str, title: str, height: int) -> alt.Chart:
    import altair as alt

    return alt.Chart(alt.NamedData(name=name), title=title, height=height)


def _x() -> alt.X:
    import altair as alt

    scale = alt.Scale(
        domainMin=alt.ExprRef("from_s"), domainMax=alt.ExprRef("to_s"), nice=False, zero=False, padding=0
    )
    return alt.X("t:Q", scale=scale, axis=alt.Axis(title=None, tickCount=8))


def _y(field: str, title: str, stack: bool | None = None, format: str = "~s") -> alt.Y:
    import altair as alt

    return alt.Y(
        field, title=title, axis=_axis(tickCount=3, format=format), stack=stack, scale=alt.Scale(nice=True)
    )


def _axis(**more: str | int) -> alt.Axis:
    import altair as alt

    return alt.Axis(minExtent=AXIS_EXTENT, maxExtent=AXIS_EXTENT, **more)


def _colors(names: tuple[str, ...], colors: tuple[str, ...]) -> alt.Scale:
    import altair as alt

    return alt.Scale(domain=list(names), range=[colors[i % len(colors)] for i in range(len(names))])


def _tips(**titles: str) -> list[alt.Tooltip]:
    import altair as alt

    return [
        alt.Tooltip(name, type="nominal", title=title or name)
        if name in WORDS
        else alt.Tooltip(name, type="quantitative", title=title or name, format=",.5~g")
        for name, title in titles.items()
    ]


def _thinned(drawn: int, of: int, noun: str) -> str:
    if drawn == of:
        return ""
    return f"Of {count(of)} {noun}, {count(drawn)} are drawn: the extremes of neighbours, so no peak is lost."


LANES = (
    _steps,
    _collections,
    _requests,
    _hits,
    _blocks,
    _evictions,
    _demotions,
    _gpu_busy,
    _gpu_power,
    _gpu_memory,
    _rss,
)
"""In reading order, top to bottom."""
