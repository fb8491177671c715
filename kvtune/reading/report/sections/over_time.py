"""A recorded server over time: the worst minute in words; traffic, times, queue, hits and causes on one time axis.

Restarts, looks without an answer, stalls and floods are marked. A look that was lost is a gap in every lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import cycle

import numpy as np

from kvtune.base.units import count, ms, number, percent, span
from kvtune.data.causes import CAUSES, cause_title
from kvtune.data.run.types import Run
from kvtune.data.show.charts import SERIES, columns
from kvtune.data.show.parts import Chart, Grid, Section, cell, grid_of
from kvtune.reading.analysis.looks import Bounds, Moment, Stretch, Timeline, stretch, timeline, waits
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.sections.lanes import AT, POOL, SPAN, TOKENS, Lane, Rows, drawn_lanes, lanes_chart

PLACE = 7
SPANS = 20
BINS = 240
LEAST_MS = 1.0
"""Shortest mean time in the queue that is mentioned."""
STANDS_OUT = 1.25
"""A minute whose first tokens took less than this times the rest's is no worse than the others."""
COLORS = {
    "restart": "var(--bad)",
    "no answer": "var(--c8)",
    "stall": "var(--c2)",
    "flood": "var(--c4)",
}


def section(analysis: RunAnalysis) -> Section | None:
    run = analysis.run
    series = timeline(run)
    if series is None:
        return None
    lead = " ".join(words(run, series))
    return Section("over_time", "Over time", lead, draw=lambda: (_chart(run, series),))


def _chart(run: Run, series: Timeline) -> Chart:
    end_s, lost = series.whole.end_s, series.whole.lost
    note = f"{count(lost)} looks got no answer: what came meanwhile is counted, and not drawn."
    return lanes_chart(
        "over_time",
        "The server over time",
        "the recording",
        drawn_lanes(LANES, run, end_s),
        end_s,
        _table(run, series),
        note if lost else "",
    )


def words(run: Run, series: Timeline) -> list[str]:
    """Return the worst minute in two sentences: what the traffic did, what the server did; in brackets the rest."""
    worst, rest = series.worst, series.rest
    marks = _capital(_marks(series.moments))
    if worst is None or rest is None:
        return [marks] if marks else []
    worst_ms, other = worst.first_token.mean_ms, rest.first_token.mean_ms
    if worst_ms is not None and other is not None and worst_ms < STANDS_OUT * other:
        calm = (
            f"No {_length(worst)} stands out: first tokens took {ms(series.whole.first_token.mean_ms or 0.0)} on "
            f"average, and {ms(worst_ms)} from {_clock(run, worst.begin_s)} to {_clock(run, worst.end_s)} UTC."
        )
        return [part for part in (calm, marks) if part]
    when = f"from {_clock(run, worst.begin_s)} to {_clock(run, worst.end_s)} UTC"
    traffic = [
        _beside(worst, rest, lambda s: _rate(s.came, s), "{} requests a second came"),
        _beside(
            worst,
            rest,
            lambda s: _rate(s.tally.query_tokens if s.tally else None, s),
            "with {} prompt tokens a second",
        ),
        _beside(worst, rest, seen_text, "{} of them seen before"),
    ]
    did = [
        _beside(worst, rest, lambda s: _ms(s.first_token.mean_ms), "first tokens took {} on average"),
        f"the slowest of 100 {bounds_text(worst.first_token.p99_ms)}" if worst.first_token.p99_ms else "",
        _beside(worst, rest, lambda s: _ms(s.queue.mean_ms), "requests that ended had waited {}")
        if (worst.queue.mean_ms or 0.0) >= LEAST_MS
        else "",
        _beside(worst, rest, lambda s: count(s.waiting or 0), "up to {} were waiting")
        if worst.waiting
        else "",
        _beside(
            worst,
            rest,
            lambda s: percent(s.tally.rate) if s.tally and s.tally.query_tokens else "",
            "{} of the prompt tokens hit",
        ),
    ]
    parts = [
        f"The worst {_length(worst)} was {when} (in brackets: the rest): "
        f"{', '.join(filter(None, traffic)) or 'what was asked is not known'}.",
        f"{_capital(', '.join(filter(None, did)))}." if any(did) else "",
        _just_before(worst, series.moments),
    ]
    return [part for part in parts if part]


def _just_before(worst: Stretch, moments: tuple[Moment, ...]) -> str:
    """Return the marks in the worst minute and in the minute before it, which may have caused it."""
    begin = 2 * worst.begin_s - worst.end_s
    words = _marks([moment for moment in moments if moment.end_s > begin and moment.begin_s < worst.end_s])
    return f"In it, or up to {ms(1000 * (worst.end_s - worst.begin_s))} before: {words}" if words else ""


def seen_text(part: Stretch) -> str:
    """Return the share of the prompt tokens that an earlier prompt had; "" if nothing tells."""
    seen = part.tally.seen if part.tally is not None else None
    if part.tally is None or seen is None or seen == (part.tally.rate, 1.0):
        return ""
    return span(*map(percent, seen))


def bounds_text(bounds: Bounds | None) -> str:
    """Return between which bounds a time of a histogram is: a bucket tells no more."""
    if bounds is None:
        return ""
    if bounds.upto is None:
        return f"more than {ms(bounds.above)}"
    return (
        f"between {ms(bounds.above)} and {ms(bounds.upto)}" if bounds.above else f"at most {ms(bounds.upto)}"
    )


def _beside(worst: Stretch, rest: Stretch, measure: Callable[[Stretch], str], text: str) -> str:
    value, other = measure(worst), measure(rest)
    if not value:
        return ""
    return f"{text.format(value)} ({other})" if other else text.format(value)


def _marks(moments: tuple[Moment, ...] | list[Moment]) -> str:
    """Return what the time axis marks, in a sentence."""
    by_kind = {kind: [moment for moment in moments if moment.kind == kind] for kind in COLORS}
    stalled_s = sum(moment.size for moment in by_kind["stall"])
    parts = [
        f"restarted {_times(sum(moment.size for moment in by_kind['restart']))}"
        if by_kind["restart"]
        else "",
        f"gave no answer to {count(sum(moment.size for moment in by_kind['no answer']))} looks"
        if by_kind["no answer"]
        else "",
        f"generated nothing for {ms(1000 * stalled_s)} while requests ran" if stalled_s else "",
    ]
    floods = by_kind["flood"]
    events = [f"the server {', '.join(filter(None, parts))}"] if any(parts) else []
    if floods:
        grew = f"the queue grew by {count(max(flood.size for flood in floods))} requests"
        events.append(grew + (f", the largest of {len(floods)} floods" if len(floods) > 1 else ""))
    return f"{'; '.join(events)}." if events else ""


def _times(number: float) -> str:
    return "once" if number == 1 else f"{count(number)} times"


def _length(part: Stretch) -> str:
    seconds = part.end_s - part.begin_s
    return "minute" if 55 <= seconds <= 65 else ms(1000 * seconds)


def _clock(run: Run, at_s: float) -> str:
    try:
        begun = datetime.fromisoformat(run.header.started_at).astimezone(UTC)
    except ValueError:
        return f"{at_s:.0f} s"
    return f"{begun + timedelta(seconds=at_s):%H:%M:%S}"


def _rate(tokens: int | None, part: Stretch) -> str:
    return "" if tokens is None or not part.seconds else number(float(f"{tokens / part.seconds:.3g}"))


def _ms(value: float | None) -> str:
    return "" if value is None else ms(value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(run: Run, series: Timeline) -> Grid:
    looks = run.table("looks")
    middle = (looks["t_s"] + looks["until_s"]) / 2
    begin, end = series.whole.begin_s, series.whole.end_s
    slots = np.clip(((middle - begin) / max(end - begin, 1e-9) * SPANS).astype(np.int64), 0, SPANS - 1)
    parts = [stretch(run, slots == number) for number in np.unique(slots).tolist()]

    def marks(part: Stretch) -> str:
        within = (m.kind for m in series.moments if m.end_s > part.begin_s and m.begin_s < part.end_s)
        return ", ".join(dict.fromkeys(within)) or "–"

    rows = (
        {
            "time (UTC)": f"{_clock(run, part.begin_s)} to {_clock(run, part.end_s)}",
            "requests": cell(part.came, count),
            "prompt tokens": cell(part.tally.query_tokens if part.tally else None, count),
            "hit": cell(part.tally.rate if part.tally else None, percent),
            "seen before": seen_text(part) or "–",
            "first token, mean": cell(part.first_token.mean_ms, ms),
            "slowest of 100": bounds_text(part.first_token.p99_ms) or "–",
            "in the queue, mean": cell(part.queue.mean_ms, ms),
            "most running": cell(part.running, count),
            "most waiting": cell(part.waiting, count),
            "preempted": cell(part.preemptions, count),
            "marks": marks(part),
        }
        for part in parts
    )
    return grid_of(rows, f"The recording in {len(parts)} spans of time")


def _edges(run: Run) -> np.ndarray:
    """Return the number of the first row of each bin; one that lost looks is a bin by itself."""
    looks = run.table("looks")
    rows = len(looks["t_s"])
    lost = np.flatnonzero(looks["lost"] > 0)
    return np.unique(np.concatenate((np.arange(0, rows, -(-rows // BINS)), lost, lost[lost + 1 < rows] + 1)))


def _marked(run: Run, end_s: float) -> Rows | None:
    series = timeline(run)
    moments = series.moments if series is not None else ()
    if not moments:
        return None
    texts: Mapping[str, Callable[[float], str]] = {
        "restart": lambda size: _times(size),
        "no answer": lambda size: f"{count(size)} looks",
        "stall": lambda size: ms(1000 * size),
        "flood": lambda size: f"{count(size)} more requests wait",
    }
    data = columns(
        t=[moment.begin_s for moment in moments],
        until=[moment.end_s for moment in moments],
        what=[moment.kind for moment in moments],
        text=[texts[moment.kind](moment.size) for moment in moments],
    )
    kinds = dict.fromkeys(moment.kind for moment in moments)
    return Rows(data, {kind: COLORS[kind] for kind in kinds}, each="marks")


def _queue(run: Run, end_s: float) -> Rows | None:
    looks, edges = run.table("looks"), _edges(run)
    series = {name: looks[name] for name in ("running", "waiting") if np.isfinite(looks[name]).any()}
    if not series:
        return None
    gap = np.add.reduceat(looks["lost"], edges) > 0
    data = columns(
        t=np.tile(looks["t_s"][edges], len(series)),
        n=np.concatenate(
            [np.where(gap, np.nan, np.fmax.reduceat(values, edges)) for values in series.values()]
        ),
        state=[name for name in series for _ in edges],
    )
    return Rows(data, {name: SERIES[number] for number, name in enumerate(series)})


def _times_of(run: Run, end_s: float) -> Rows | None:
    looks, edges = run.table("looks"), _edges(run)
    ends = [*edges[1:].tolist(), len(looks["t_s"])]
    points: list[tuple[float, float, str]] = []
    for begin, end in zip(edges.tolist(), ends, strict=True):
        if looks["lost"][begin:end].any():
            continue
        rows, t_s = np.arange(begin, end), float(looks["t_s"][begin] + looks["until_s"][end - 1]) / 2
        first = waits(run, rows, "first_token", ("first_tokens", "first_token_s"))
        queue = waits(run, rows, "queue", ("queued", "queue_s"))
        high = first.p99_ms.upto if first.p99_ms is not None else None
        for value, what in (
            (first.mean_ms, "first token, mean"),
            (high, "slowest of 100, at most"),
            (queue.mean_ms, "in the queue, mean"),
        ):
            if value is not None:
                points.append((t_s, value / 1000, what))
    if not points:
        return None
    data = columns(t=[t for t, _, _ in points], s=[s for _, s, _ in points], what=[w for _, _, w in points])
    names = dict.fromkeys(what for _, _, what in points)
    return Rows(data, {name: SERIES[number] for number, name in enumerate(names)})


def _tokens(run: Run, end_s: float) -> Rows | None:
    looks, causes, edges = run.table("looks"), run.table("look_misses"), _edges(run)
    if not np.isfinite(looks["query_tokens"]).any():
        return None
    drawn = looks["lost"] == 0
    hits = np.add.reduceat(np.where(drawn, np.nan_to_num(looks["hit_tokens"]), 0.0), edges)
    shares: dict[str, np.ndarray] = {"hit": hits}
    for cause in [*CAUSES, *sorted(set(causes["cause"].tolist()) - set(CAUSES))]:
        rows = causes["cause"] == cause
        if rows.any():
            tokens = np.bincount(causes["look"][rows], causes["tokens"][rows], minlength=len(drawn))
            shares[cause] = np.add.reduceat(np.where(drawn, tokens, 0.0), edges)
    ends = looks["until_s"][np.append(edges[1:] - 1, len(drawn) - 1)]
    data = columns(
        t=np.tile(looks["t_s"][edges], len(shares)),
        until=np.tile(ends, len(shares)),
        tokens=np.concatenate(list(shares.values())),
        what=[_title(name) for name in shares for _ in edges],
    )
    own = {"hit": "var(--c-hit)", **{key: cause.colour for key, cause in CAUSES.items()}}
    free = cycle(color for color in SERIES if color not in own.values())
    colors = {_title(name): own.get(name) or next(free) for name in shares}
    return Rows(data, colors, each="each")


def _title(name: str) -> str:
    return name if name == "hit" else cause_title(name)


def _pool(run: Run, end_s: float) -> Rows | None:
    looks, edges = run.table("looks"), _edges(run)
    if not np.isfinite(looks["pool_use"]).any():
        return None
    used = np.where(
        np.add.reduceat(looks["lost"], edges) > 0, np.nan, 100 * np.fmax.reduceat(looks["pool_use"], edges)
    )
    return Rows(columns(t=looks["t_s"][edges], used=used))


def _counted(name: str, title: str, height: int, column: str, noun: str) -> Lane:
    """Return a lane with bars of how many there were in each bin, as a column of the looks has them."""

    def rows(run: Run, end_s: float) -> Rows | None:
        looks, edges = run.table("looks"), _edges(run)
        if not looks[column].any():
            return None
        ends = looks["until_s"][np.append(edges[1:] - 1, len(looks["t_s"]) - 1)]
        counts = np.add.reduceat(np.where(looks["lost"] == 0, looks[column], 0), edges)
        return Rows(columns(t=looks["t_s"][edges], until=ends, n=counts), each="each")

    return Lane(name, title, height, rows, y="n", axis=noun, mark="bars", tips={**SPAN, "n": noun})


LANES = (
    Lane(
        "marks",
        "Restarts, stalls, floods",
        18,
        _marked,
        y="what",
        axis="",
        mark="spans",
        color="what",
        tips={**SPAN, "what": "what", "text": "how much"},
    ),
    Lane("queue", "Requests", 70, _queue, y="n", axis="requests", mark="stairs", color="state"),
    Lane(
        "waits",
        "Until the first token, and in the queue (of a histogram: at most the bucket's bound)",
        110,
        _times_of,
        y="s",
        axis="seconds",
        mark="points",
        color="what",
        tips={**AT, "what": "", "s": "seconds"},
    ),
    Lane("prompt", "Prompt tokens by hit and cause of miss", 100, _tokens, **TOKENS),
    Lane("pool", "KV blocks held by requests", 60, _pool, **POOL),
    _counted("preempted", "Preemptions", 40, "preemptions", "requests"),
    _counted("evicted", "KV blocks evicted", 60, "evicted_blocks", "blocks"),
)
"""The lanes from top to bottom."""
