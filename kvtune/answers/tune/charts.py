"""The charts of a study's page: maps of two knobs, effects of single knobs, the Pareto front.

A page's colours are CSS variables, which a chart cannot interpolate. The maps therefore vary the opacity of one colour,
and write the figure into each cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtune.answers.tune.result import Effect, Place, Settings, Trial
from kvtune.answers.tune.rows import figure_of, number_of, settings_text, shown_as
from kvtune.base.units import number
from kvtune.data.recipe import Scalar, text_of
from kvtune.data.show.charts import columns, spec_of
from kvtune.data.show.parts import Cell, Chart, Section, cell, grid

PAIR = ("pin_window", "min_drop")
MOST_PANELS = 6
SHADES = (0.05, 0.55)  # opacity at the lowest and the highest figure: text stays readable in both themes


def effects_section(
    effects: Sequence[Effect], objective: str, place: Place, varied: Sequence[str]
) -> Section | None:
    """Draw each knob's effect. `effects`: of trials that change one knob of the best setting. `varied`: knobs tried."""
    import altair as alt

    if not varied:
        return None
    if place != "sim":
        why = "Not drawn: one engine run of each setting does not tell what a knob did from what the machine did."
        return Section("effects", "What each knob did", why)
    if not effects:
        why = "Not drawn: no trial differs from the best one in one knob alone."
        return Section("effects", "What each knob did", why)
    title, scale = shown_as(objective).head_with_unit, shown_as(objective).unit.scale
    charts = []
    highest = max(scale * each.mean for effect in effects for each in effect.means)
    for nth, effect in enumerate(effects):
        name, knob = f"effect-{nth}", effect.knob
        means = sorted(effect.means, key=lambda each: _order(each.value))
        data = columns(value=[text_of(v) for v, _, _ in means], figure=[scale * m for _, m, _ in means])
        # The same axis for all knobs, to compare their effects.
        top = alt.Scale(domain=[0, highest * 1.05 or 1])
        drawing = alt.Chart(alt.NamedData(name=name), height=150).mark_bar(color="var(--c1)").encode(
            x=alt.X("value:N", sort=None, axis=alt.Axis(title=knob, labelAngle=0)),
            y=alt.Y("figure:Q", title=title, scale=top),
            tooltip=[
                alt.Tooltip("value:N", title=knob),
                alt.Tooltip("figure:Q", title=title, format=",.4~g"),
            ],
        )  # fmt: skip
        rows = [(text_of(v), Cell(number(scale * m), scale * m)) for v, m, _ in means]
        table = grid((knob, title), rows, f"The best setting with another {knob}")
        words = ", ".join(f"{number(scale * m)} at {text_of(v)}" for v, m, _ in means)
        label = f"{title[0].upper()}{title[1:]}: {words}."
        charts.append(Chart(name, knob, label, spec_of(drawing), table, {name: data}))
    lead = (
        "The best setting with one knob changed at a time, each a replay: nothing else differs from bar to bar. The "
        "largest effect first; `default`: without the knob."
    )
    return Section("effects", "What each knob did", lead, draw=lambda: charts, beside=True, page_only=True)


def maps_section(
    trials: Sequence[Trial], knobs: Sequence[str], objective: str, best: Trial | None = None
) -> Section | None:
    """Draw a map of two knobs for each block size: `PAIR` if both were tried, else the first two of `knobs`.

    The cell of `best` has a frame.
    """
    pair = PAIR if all(name in knobs for name in PAIR) else tuple(k for k in knobs if k != "block_size")[:2]
    if len(pair) < 2:
        return None
    panels: dict[Scalar | None, list[Trial]] = {}
    for trial in trials:
        if all(name in trial.settings for name in pair):
            panels.setdefault(trial.settings.get("block_size"), []).append(trial)
    if not panels:
        return None
    every = [figure_of(trial, objective) for panel in panels.values() for trial in panel]
    figures = [figure for figure in every if figure is not None]
    ends = (min(figures), max(figures))
    charts: list[Chart] = []
    for block in sorted(panels, key=_order)[:MOST_PANELS]:
        framed = best.settings if best is not None and best.settings.get("block_size") == block else {}
        charts.append(_map(f"map-{len(charts)}", panels[block], pair, block, objective, ends, framed))
    lead = "The best trial in each cell: other knobs are at whatever value was best there."
    if best is not None and best.settings.keys() >= set(pair):
        lead += " A frame: the best setting."
    if len(panels) > MOST_PANELS:
        lead += f" Of {len(panels)} block sizes {MOST_PANELS} are drawn; the table of trials holds all."
    return Section("maps", "Two knobs together", lead, draw=lambda: charts, beside=True, page_only=True)


def _map(
    name: str,
    trials: Sequence[Trial],
    pair: Sequence[str],
    block: Scalar | None,
    objective: str,
    ends: tuple[float, float],
    framed: Settings,
) -> Chart:
    import altair as alt

    title = shown_as(objective).head_with_unit
    pick = min if shown_as(objective).better < 0 else max
    cells: dict[tuple[Scalar, Scalar], float] = {}
    for trial in trials:
        place = (trial.settings[pair[0]], trial.settings[pair[1]])
        figure = figure_of(trial, objective) or 0.0
        cells[place] = pick(cells.get(place, figure), figure)
    order = sorted(cells, key=lambda place: (_order(place[0]), _order(place[1])))
    best = framed.get(pair[0], ""), framed.get(pair[1], "")
    top = pick(cells.values())
    equals = sum(figure == top for figure in cells.values())
    drawn = columns(
        x=[text_of(x) for x, _ in order],
        y=[text_of(y) for _, y in order],
        figure=[cells[place] for place in order],
        text=[f"{cells[place]:,.3g}" for place in order],
        best=[place == best for place in order],
    )
    rows_of_y = [text_of(y) for y in sorted({y for _, y in cells}, key=_order)]
    shades = alt.Scale(domain=list(ends), range=list(SHADES))
    base = alt.Chart(alt.NamedData(name=name), height=38 * len(rows_of_y) + 4).encode(
        x=alt.X("x:N", sort=None, axis=alt.Axis(title=pair[0], labelAngle=0)),
        y=alt.Y("y:N", sort=rows_of_y, title=pair[1]),
    )
    tooltip = [
        alt.Tooltip("x:N", title=pair[0]),
        alt.Tooltip("y:N", title=pair[1]),
        alt.Tooltip("figure:Q", title=title, format=",.4~g"),
    ]
    shade = base.mark_rect(color="var(--c1)").encode(
        opacity=alt.Opacity("figure:Q", scale=shades, legend=None), tooltip=tooltip
    )
    frame = base.transform_filter("datum.best").mark_rect(
        fill=None, filled=False, stroke="var(--ink)", strokeWidth=2
    )
    figures = base.mark_text(color="var(--ink)", tooltip=None).encode(text="text:N")
    rows = [(text_of(x), text_of(y), Cell(number(cells[x, y]), cells[x, y])) for x, y in order]
    heading = f"block_size {block}" if block is not None else " and ".join(pair)
    where = f", at {pair[0]} {text_of(best[0])} and {pair[1]} {text_of(best[1])}" if best in cells else ""
    label = (
        f"{title[:1].upper()}{title[1:]}: best {number(top)}{where}; from {number(min(cells.values()))} to "
        f"{number(max(cells.values()))}; {equals} of {len(cells)} cells have the best figure."
    )
    table = grid((*pair, title), rows, f"{heading}: {title}")
    return Chart(name, heading, label, spec_of(alt.layer(shade, frame, figures)), table, {name: drawn})


def front_section(
    trials: Sequence[Trial], front: Iterable[int], axes: Sequence[str] = ("ttft", "throughput")
) -> Section | None:
    """Draw the trials over the first two of `axes`, and mark those on `front`, the Pareto front over all `axes`."""
    import altair as alt

    across, up = axes[:2]
    drawn = [t for t in trials if figure_of(t, across) is not None and figure_of(t, up) is not None]
    if len(drawn) < 2:
        return None
    ahead = set(front)
    state = ["on the front" if t.number in ahead else "beaten" for t in drawn]
    data = columns(
        across=[figure_of(t, across) for t in drawn],
        up=[figure_of(t, up) for t in drawn],
        state=state,
        trial=[t.number for t in drawn],
        settings=[settings_text(t) for t in drawn],
    )
    states = ["on the front", "beaten"]
    base = alt.Chart(alt.NamedData(name="front"), height=260).encode(
        x=alt.X("across:Q", title=_axis(across), scale=alt.Scale(zero=False, padding=14)),
        y=alt.Y("up:Q", title=_axis(up), scale=alt.Scale(zero=False, padding=14)),
    )
    points = base.mark_point(filled=True, size=64, opacity=0.8).encode(
        color=alt.Color(
            "state:N", scale=alt.Scale(domain=states, range=["var(--c2)", "var(--c8)"]), title=None
        ),
        shape=alt.Shape("state:N", scale=alt.Scale(domain=states, range=["diamond", "circle"]), title=None),
        tooltip=[
            alt.Tooltip("trial:Q"),
            alt.Tooltip("settings:N"),
            alt.Tooltip("across:Q", title=shown_as(across).head_with_unit, format=",.4~g"),
            alt.Tooltip("up:Q", title=shown_as(up).head_with_unit, format=",.4~g"),
        ],
    )
    best = sorted((t for t in drawn if t.number in ahead), key=lambda t: figure_of(t, across) or 0.0)
    rows = [
        (
            cell(t.number, str),
            settings_text(t),
            *(Cell(number_of(t, name), figure_of(t, name)) for name in axes),
        )
        for t in best
    ]
    heads = ("trial", "settings", *(shown_as(name).head_with_unit for name in axes))
    if len(best) == 1:
        label = f"Trial {best[0].number} is the best in all of them, so there is nothing to trade."
    else:
        rest = "every other trial is worse in one figure and better in none"
        label = f"{len(best)} of {len(drawn)} trials are on the front; {rest}."
    names = [shown_as(name).title for name in axes]
    chart = Chart(
        "front",
        f"{names[0].capitalize()} against {names[1]}",
        label,
        spec_of(points),
        grid(heads, rows, "Trials on the front"),
        {"front": data},
    )
    lead = (
        f"{', '.join(names[:-1]).capitalize()} and {names[-1]}: a trial on the front cannot be improved in one of them "
        "without losing in another (Pareto front)."
    )
    return Section("front", "What can be traded", lead, draw=lambda: (chart,), page_only=True)


def _axis(name: str) -> str:
    return f"{shown_as(name).head_with_unit}, {'less' if shown_as(name).better < 0 else 'more'} is better"


def _order(value: object) -> tuple[int, float, str]:
    """Return a sort key: no value first, then numbers by size, then words."""
    if value is None:
        return 0, 0.0, ""
    if isinstance(value, (int, float)):
        return 1, float(value), ""
    return 2, 0.0, str(value)
