"""The page of a sweep: all trials in a table, a heat map for each pair of knobs that matters, what each knob did.

In: the `--json` object of `kvtune sweep` (plain data), never the tuner itself. Drawn by the frame of every other page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtune.report.banners import Banner
from kvtune.report.charts import Cell, Chart, Columns, Grid, Section, columns, grid, spec_of

FIGURES = {
    "hit-rate": (("prefix_cache", "hit_rate"), "hit rate (%)", 100.0),
    "ttft": (("ttft_ms", "mean"), "first token (ms)", 1.0),
    "throughput": (("throughput_tok_s",), "tokens/s", 1.0),
}
PAIR = ("pin_window", "min_drop")
MOST_PANELS = 6

Trial = Mapping[str, Any]


def sweep_sections(
    found: Mapping[str, Any], effects: Sequence[tuple[str, Sequence[tuple[Any, float, int]]]]
) -> Any:
    """Sections of the page. `effects`: per knob its values with mean figure and number of trials, largest first."""
    by = str(found["objective"])
    trials = [t for t in found["trials"] if t["state"] == "complete" and _figure(t, by) is not None]
    knobs = [name for name, _ in effects]
    sections = [_outcome(found, by), _effects(effects, by), _maps(trials, knobs, by), _table(found, by)]
    return [s for s in sections if s is not None]


def sweep_page(
    found: Mapping[str, Any], effects: Sequence[tuple[str, Sequence[tuple[Any, float, int]]]]
) -> str:
    """One self-contained HTML file."""
    from kvtune.report.page import _render

    first = found["trials"][0] if found["trials"] else {}
    model = str(first.get("model", ""))
    spec = str(first.get("workload", {}).get("spec", ""))
    simulated = all(t["on"] == "sim" for t in found["trials"])
    told = (
        Banner("info", "Simulated.", "No engine ran: hits are exact, times are predicted.")
        if simulated
        else None
    )
    return _render(
        title=f"{model} · sweep · kvtune",
        eyebrow="kvtune sweep",
        heading=model,
        subtitle=spec,
        sections=sweep_sections(found, effects),
        banners=[told] if told else [],
    )


def _outcome(found: Mapping[str, Any], by: str) -> Section:
    best, baseline = found["best"], found["baseline"]
    lines = [("verdict", found["verdict"]["text"])]
    for name, trial in (("best", best), ("baseline", baseline)):
        if trial is not None:
            lines.append((name, f"{_settings(trial)}: {_text(trial, by)}"))
    note = "Each setting ran once. `kvtune tune` repeats the best on the engine and gives intervals."
    return Section("outcome", "What came out", "", "outcome.html", {"lines": lines, "note": note})


def _effects(effects: Sequence[tuple[str, Sequence[tuple[Any, float, int]]]], by: str) -> Section | None:
    import altair as alt

    if not effects:
        return None
    _, title, scale = FIGURES[by]
    charts, data = [], {}
    for knob, means in effects:
        name = f"effect-{knob.replace('_', '-')}"
        data[name] = columns(value=[_shown(v) for v, _, _ in means], figure=[scale * m for _, m, _ in means])
        drawing = (
            alt.Chart(alt.NamedData(name=name), height=150)
            .mark_line(point=True, color="var(--c1)")
            .encode(
                x=alt.X("value:N", sort=None, axis=alt.Axis(title=knob, labelAngle=0)),
                y=alt.Y("figure:Q", title=title, scale=alt.Scale(zero=False)),
                tooltip=[
                    alt.Tooltip("value:N", title=knob),
                    alt.Tooltip("figure:Q", title=title, format=",.4~g"),
                ],
            )
        )
        rows = [(_shown(v), Cell(f"{scale * m:,.4g}", scale * m), Cell(str(n), n)) for v, m, n in means]
        table = grid((knob, f"mean {title}", "trials"), rows, f"Marginal effect of {knob}")
        label = ", ".join(f"{_shown(v)}: {scale * m:,.4g}" for v, m, _ in means)
        charts.append(Chart(name, knob, f"Mean {title} at each value: {label}.", spec_of(drawing), table))
    lead = "The mean over all trials at each value of a knob, the others averaged over; the largest effect first."
    return Section("effects", "What each knob did", lead, "charts.html", charts=tuple(charts), data=data)


def _maps(trials: Sequence[Trial], knobs: Sequence[str], by: str) -> Section | None:
    pair = PAIR if all(name in knobs for name in PAIR) else tuple(k for k in knobs if k != "block_size")[:2]
    if len(pair) < 2:
        return None
    panels: dict[Any, list[Trial]] = {}
    for trial in trials:
        if all(name in trial["settings"] for name in pair):
            panels.setdefault(trial["settings"].get("block_size"), []).append(trial)
    charts: list[Chart] = []
    data: dict[str, Columns] = {}
    for block, own in list(panels.items())[:MOST_PANELS]:
        chart, drawn = _map(f"map-{len(charts)}", own, pair, block, by)
        charts.append(chart)
        data[chart.id] = drawn
    if not charts:
        return None
    lead = "The best trial in each cell: other knobs of the sweep are at whatever value was best there."
    return Section("maps", "Two knobs together", lead, "charts.html", charts=tuple(charts), data=data)


def _map(
    name: str, trials: Sequence[Trial], pair: Sequence[str], block: Any, by: str
) -> tuple[Chart, Columns]:
    import altair as alt

    _, title, scale = FIGURES[by]
    pick = min if by == "ttft" else max
    cells: dict[tuple[Any, Any], float] = {}
    for trial in trials:
        at = (trial["settings"][pair[0]], trial["settings"][pair[1]])
        figure = scale * (_figure(trial, by) or 0.0)
        cells[at] = pick(cells.get(at, figure), figure)
    drawn = columns(
        x=[_shown(x) for x, _ in cells], y=[_shown(y) for _, y in cells], figure=list(cells.values())
    )
    ramp = alt.Scale(range=[0.08, 1])  # a page's colours are variables: they cannot be interpolated
    drawing = (
        alt.Chart(alt.NamedData(name=name), height=34 * len({y for _, y in cells}) + 20)
        .mark_rect(color="var(--c1)")
        .encode(
            x=alt.X("x:N", sort=None, axis=alt.Axis(title=pair[0], labelAngle=0)),
            y=alt.Y("y:N", sort=None, title=pair[1]),
            opacity=alt.Opacity("figure:Q", title=title, scale=ramp),
            tooltip=[
                alt.Tooltip("x:N", title=pair[0]),
                alt.Tooltip("y:N", title=pair[1]),
                alt.Tooltip("figure:Q"),
            ],
        )
    )
    rows = [(_shown(x), _shown(y), Cell(f"{f:,.4g}", f)) for (x, y), f in cells.items()]
    where = f"block_size {block}: " if block is not None else ""
    best = pick(cells.items(), key=lambda item: item[1])
    label = f"Best {title} {best[1]:,.4g} at {pair[0]} {_shown(best[0][0])}, {pair[1]} {_shown(best[0][1])}."
    heading = f"{where}{pair[0]} and {pair[1]}"
    return Chart(name, heading, label, spec_of(drawing), grid((*pair, title), rows, heading)), drawn


def _table(found: Mapping[str, Any], by: str) -> Section:
    trials = list(found["trials"])
    knobs = list(dict.fromkeys(name for t in trials for name in t["settings"]))
    rows = []
    for t in trials:
        own = [_shown(t["settings"][k]) if k in t["settings"] else "" for k in knobs]
        figures = [
            Cell(_text(t, name), _figure(t, name)) if t["state"] == "complete" else "–" for name in FIGURES
        ]
        rows.append((Cell(str(t["number"]), t["number"]), t["on"], *own, *figures, t["why"] or t["state"]))
    heads = ("trial", "on", *knobs, *(title for _, title, _ in FIGURES.values()), "state")
    tables: list[Grid] = [grid(heads, rows, "All trials")]
    return Section("trials", "Trials", "", "figures.html", {"tables": tables, "why": []})


def _figure(trial: Trial, by: str) -> float | None:
    value: Any = trial
    for name in FIGURES[by][0]:
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else None


def _text(trial: Trial, by: str) -> str:
    figure = _figure(trial, by)
    return "–" if figure is None else f"{FIGURES[by][2] * figure:,.4g}"


def _settings(trial: Trial) -> str:
    core = "stock" if trial["core"] == "stock" else "kvtune core"
    return f"{core}, " + (", ".join(f"{k} {_shown(v)}" for k, v in trial["settings"].items()) or "defaults")


def _shown(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
