"""The section of a study's page that says how much host memory is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtune.analysis.study import TierCurve, TierPoint
from kvtune.report.charts import SERIES, Cell, Chart, Section, columns, grid, spec_of
from kvtune.report.console.tier_curve import KNEE, curve_name, knee_line

FIGURES: tuple[tuple[str, str, Callable[[TierPoint], float | None]], ...] = (
    ("hits", "hit rate (%)", lambda point: 100 * point.hit_rate),
    ("computed", "computed prompt tokens", lambda point: point.computed_tokens),
    ("ttft", "first token (ms)", lambda point: point.ttft_ms),
)
MOST = len(SERIES)


def tier_section(curves: Sequence[TierCurve]) -> Section | None:
    """Hits, computed tokens and first-token times over GiB, a line for each setting of the rest."""
    if not curves:
        return None
    drawn = curves[:MOST]
    names = [curve_name(curve) for curve in drawn]
    lead = "Trials that differ in the size of the host memory behind the KV cache alone. " + " ".join(
        f"{name[:1].upper()}{name[1:]}: {knee_line(curve)}." for name, curve in zip(names, drawn, strict=True)
    )
    if len(curves) > MOST:
        lead += f" Of {len(curves)} curves the {MOST} with the most hits are drawn."
    charts = tuple(_chart(drawn, names, *figure) for figure in FIGURES)
    return Section("host-memory", "How much host memory is worth it", lead, "pair.html", charts=charts)


def _chart(
    curves: Sequence[TierCurve],
    names: Sequence[str],
    name: str,
    title: str,
    figure_of: Callable[[TierPoint], float | None],
) -> Chart:
    import altair as alt

    points = [
        (n, c, p) for n, c in zip(names, curves, strict=True) for p in c.points if figure_of(p) is not None
    ]
    data = columns(
        curve=[n for n, _, _ in points],
        gib=[p.gib for _, _, p in points],
        figure=[figure_of(p) for _, _, p in points],
        knee=[p.gib == c.knee for _, c, p in points],
        trial=[p.trial for _, _, p in points],
    )
    base = alt.Chart(alt.NamedData(name=f"tier-{name}"), height=220).encode(
        x=alt.X("gib:Q", title="host memory (GiB)"),
        y=alt.Y("figure:Q", title=title, scale=alt.Scale(zero=False, padding=14)),
        color=alt.Color(
            "curve:N",
            title=None,
            scale=alt.Scale(domain=list(names), range=list(SERIES[: len(names)])),
            legend=alt.Legend(orient="bottom", direction="vertical", labelLimit=400),
        ),
        tooltip=[
            alt.Tooltip("curve:N"),
            alt.Tooltip("gib:Q", title="host memory (GiB)"),
            alt.Tooltip("figure:Q", title=title, format=",.4~g"),
            alt.Tooltip("trial:Q"),
        ],
    )
    lines = base.mark_line(point=True)
    knees = base.transform_filter("datum.knee").mark_point(shape="diamond", size=220, strokeWidth=2)
    rows = [
        (
            n,
            Cell(f"{p.gib:g}", p.gib),
            Cell(f"{figure_of(p):,.4g}", figure_of(p)),
            KNEE if p.gib == c.knee else "",
            Cell(str(p.trial), p.trial),
        )
        for n, c, p in points
    ]
    heads = ("settings", "host memory (GiB)", title, "", "trial")
    label = f"{title[:1].upper()}{title[1:]} over host memory. " + " ".join(
        f"{n}: " + ", ".join(f"{figure_of(p):,.4g} at {p.gib:g} GiB" for o, _, p in points if o == n) + "."
        for n in names
    )
    spec = spec_of(alt.layer(lines, knees))
    return Chart(f"tier-{name}", title, label, spec, grid(heads, rows, title), {f"tier-{name}": data})
