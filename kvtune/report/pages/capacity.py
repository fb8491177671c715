"""The page of `kvtune capacity`: hits kept by sessions at once, both ends, and what moves them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from kvtune.capacity.result import Capacity, Point
from kvtune.capacity.text import (
    CURVE,
    LIMITS,
    answered,
    first_line,
    given,
    numbers,
    point_row,
    preempted,
    remedy_row,
    said_of,
    shared,
)
from kvtune.report.banners import Banner
from kvtune.report.charts import columns, spec_of
from kvtune.report.pages.frame import render
from kvtune.report.parts import Cell, Chart, Section, grid
from kvtune.units import percent

REPLAY, ESTIMATE = "exact replays", "estimates"


def identity(found: Capacity) -> str:
    """Return what tells the page's file from others: the question, not the answer."""
    asked = msgspec.json.encode(
        (found.model, found.load.workload, found.keep, found.hours, found.pool.blocks)
    )
    return hashlib.blake2b(asked, digest_size=8).hexdigest()


def capacity_page(found: Capacity) -> str:
    """Return the page, as HTML."""
    return render(
        identity(found),
        title=f"{found.model} · sessions · kvtune",
        eyebrow="kvtune capacity",
        heading=found.model,
        subtitle=first_line(found),
        sections=list(_sections(found)),
        banners=_banners(found),
    )


def _banners(found: Capacity) -> list[Banner]:
    if found.cost.trusted:
        return []
    return [
        Banner(
            "warn",
            "Where the device is full is not known to a session",
            "Ranges marked * are of step costs that are not known or not trusted. How many sessions keep their hits "
            "hardly depends on them.",
        )
    ]


def _sections(found: Capacity) -> Iterator[Section]:
    rows = [[Cell(text) for text in point_row(point)] for point in found.curve]
    yield Section(
        "curve",
        "How many sessions fit",
        lead=f"{'. '.join(given(found))}.",
        tables=(grid(CURVE, rows, "Sessions at once; below three quarters of the hits, replays only"),),
        notes=(*(answered(one) for one in found.answers), *preempted(found)),
        draw=lambda: [_chart(found)],
    )
    if found.cuts:
        cut = [
            (f"{one.max_think:,.0f} s", numbers(one.sessions), f"{one.turns_a_minute:.0f}")
            for one in found.cuts
        ]
        yield Section(
            "cuts",
            "Where pauses are cut",
            lead="A session that pauses for long hardly uses the pool, and counts. Estimates.",
            tables=(grid(("pauses cut at", "fit", "turns a minute, together"), cut, "By the cut of pauses"),),
        )
    if found.remedies:
        moved = [(*remedy_row(one), said_of(one)) for one in found.remedies]
        heads = ("what moves it", "hits kept", "sessions", "full from", "")
        yield Section(
            "remedies",
            "What moves it",
            lead="Each was replayed with as many sessions as the answer's upper end.",
            tables=(grid(heads, moved, "Changes of the engine"),),
        )
    if found.replicas is not None:
        lead, *numbers_ = shared(found.replicas)
        yield Section("replicas", "How many replicas this load needs", lead=f"{lead}.", notes=tuple(numbers_))
    unknown = [(one.what, one.why, one.next) for one in found.cannot_say]
    yield Section(
        "unknown",
        "What cannot be said",
        tables=(grid(("what", "why", "what to do"), unknown, "Not known"),),
    )


def _chart(found: Capacity) -> Chart:
    """Draw the share of the hits that is kept, mean and range over seeds, and both regions."""
    import altair as alt

    rows = [(point, 100 * one) for point in found.curve for one in (point.kept.mean,)]
    data = columns(
        sessions=[point.sessions for point, _ in rows],
        kept=[kept for _, kept in rows],
        low=[100 * point.kept.low for point, _ in rows],
        high=[100 * point.kept.high for point, _ in rows],
        by=[_by(point) for point, _ in rows],
    )
    asked = next(one for one in found.answers if one.keep == found.keep)
    last = max(point.sessions for point in found.curve)
    regions = [(asked.sessions.low, asked.sessions.high, f"ends by {LIMITS[asked.limit]}")]
    if found.collapse is not None and found.collapse.sessions.low <= last:
        regions.append(
            (found.collapse.sessions.low, min(found.collapse.sessions.high, last), "the device is full")
        )
    ends = columns(
        start=[low - 0.5 for low, _, _ in regions],
        stop=[high + 0.5 for _, high, _ in regions],
        what=[what for _, _, what in regions],
    )
    base = alt.Chart(alt.NamedData(name="kept"), height=260)
    across = alt.X(
        "sessions:Q",
        title="sessions at once",
        scale=alt.Scale(domain=[0, last + 1]),
        axis=alt.Axis(format="d"),
    )
    color = alt.Color(
        "by:N", title=None, scale=alt.Scale(domain=[REPLAY, ESTIMATE], range=["var(--c-hit)", "var(--c4)"])
    )
    drawing = alt.layer(
        alt.Chart(alt.NamedData(name="ends"))
        .mark_rect(opacity=0.12)
        .encode(
            x=alt.X("start:Q", title="sessions at once"),
            x2="stop:Q",
            color=alt.Color("what:N", title=None, legend=None),
            tooltip=[alt.Tooltip("what:N", title=" ")],
        ),
        base.mark_rule().encode(
            x=across, y=alt.Y("low:Q", title="hits kept (%)"), y2="high:Q", color=color.legend(None)
        ),
        base.mark_point(filled=True, size=50).encode(
            x=across,
            y=alt.Y("kept:Q", title="hits kept (%)", scale=alt.Scale(domain=[0, 100])),
            color=color,
            tooltip=[
                alt.Tooltip("sessions:Q", title="sessions"),
                alt.Tooltip("kept:Q", title="hits kept (%)", format=".1f"),
                alt.Tooltip("by:N", title=" "),
            ],
        ),
    ).resolve_scale(color="independent")
    table = grid(
        ("sessions", "hits kept", "lowest seed", "highest seed", "by"),
        [
            (
                point.sessions,
                percent(point.kept.mean),
                percent(point.kept.low),
                percent(point.kept.high),
                _by(point),
            )
            for point in found.curve
        ],
        "Share of an infinite cache's hits",
    )
    return Chart(
        "kept",
        "Hits that are kept, of what is possible",
        first_line(found),
        spec_of(drawing),
        table,
        {"kept": data, "ends": ends},
        "A line is the range over seeds. Shaded: where the answer ends, by seed, and where the device is full.",
    )


def _by(point: Point) -> str:
    return REPLAY if point.by == "replay" else ESTIMATE
