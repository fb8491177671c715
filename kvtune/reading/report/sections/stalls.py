"""Slow tokens: a table of causes, a table of the worst stalls, and a chart of the time around each stall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvtune.base.units import count, ms, percent
from kvtune.data.run.types import Run, Table
from kvtune.data.show.charts import SERIES, columns, spec_of
from kvtune.data.show.parts import Cell, Chart, Section, cell, grid, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.processes import process_title
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.stalls.account import Stall, Stalls
from kvtune.reading.analysis.stalls.delays import ADVICE, CAUSES, LEAST_SHARE
from kvtune.reading.analysis.stalls.times import Seconds
from kvtune.reading.report.names import process_name, source_line

PLACE = 30
LIMITS = ("stalls",)
Bar = tuple[str, float, float, str, str]
"""Lane, start, end, kind, and the text shown when the reader points at the bar."""

MARGIN = 0.3
"""Time drawn before and after a gap, as a share of the gap's length."""

MOST_BARS = 200
"""The most bars drawn in a lane; the longest ones are drawn."""

LEAST_WIDTH = 0.002
"""The least width of a bar, as a share of the axis."""

LEAST_WAIT = 0.1
"""The least wait for a CPU that is drawn, as a share of the time between two samples."""

LEAST_OPEN = 0.05
"""The list of single stalls is unfolded if all stalls together cost at least this share of the run's time."""

KINDS = {
    "gap": "var(--c-rule)",
    "decode only": SERIES[0],
    "with prefill": SERIES[1],
    "collection": "var(--c-gen2)",
    "stopped": SERIES[3],
    "waited for a CPU": SERIES[4],
    "taken": SERIES[5],
    "token": SERIES[2],
}


def section(analysis: RunAnalysis) -> Section | None:
    stalls = analysis.stalls
    if not stalls.slow:
        return None
    causes = (
        {
            "largest cause": CAUSES[cause],
            "gaps": cell(own.gaps, count),
            "over the median": cell(own.excess_ms, ms),
            "share": cell(own.share, percent),
        }
        for cause, own in stalls.causes.items()
        if own.share >= LEAST_SHARE
    )
    worst = (
        {
            "at": cell(stall.start_s, "{:.3f} s".format),
            "longest gap": cell(stall.gap_ms, ms),
            "gaps": cell(stall.gaps, count),
            Column("cause", right=False, folds=True): why(stall),
        }
        for stall in stalls.worst
    )
    return Section(
        id="stalls",
        title="Slow tokens",
        lead=lead(stalls),
        tables=(grid_of(causes, "Slow gaps by cause"), grid_of(worst, "The worst stalls")),
        notes=(advice(stalls),),
        fold=_folded(analysis),
        draw=lambda: (
            _window(analysis.run, stall, number) for number, stall in enumerate(stalls.worst, start=1)
        ),
    )


def lead(stalls: Stalls) -> str:
    """Return a sentence that says how many gaps were slow."""
    were, noun = "was" if stalls.slow == 1 else "were", "stall" if stalls.stalls == 1 else "stalls"
    return (
        f"{count(stalls.slow)} of {count(stalls.gaps)} gaps between deliveries of tokens {were} over "
        f"{ms(stalls.limit_ms or 0.0)} (twice their median), in {count(stalls.stalls)} {noun}: "
        f"{ms(stalls.excess_ms)} above the median in total."
    )


def advice(stalls: Stalls) -> str:
    """Return the cause that cost most of the time, and advice."""
    largest = next(iter(stalls.causes))
    return f"Most of the time: {CAUSES[largest]}. {ADVICE[largest]}"


def why(stall: Stall) -> str:
    """Return the cause of one stall, with the recorded details."""
    evidence, title = stall.evidence, CAUSES[stall.cause]
    if stall.cause == "prefill" and evidence.requests:
        more = evidence.prefilling - len(evidence.requests)
        names = ", ".join(evidence.requests) + (f" and {more} more" if more > 0 else "")
        return f"{title}: {names} ({count(evidence.prompt_tokens)} prompt tokens)"
    if stall.cause == "collection" and evidence.pause_ms is not None:
        file, _, line = evidence.line.rpartition(":")
        where = f", set off at {source_line(file, int(line))}" if line.isdigit() else ""
        pause = f"generation {evidence.generation}, {ms(evidence.pause_ms)}"
        return f"{title} in {process_title(evidence.process)}: {pause}{where}"
    if stall.cause == "off_cpu" and evidence.process:
        reason = "a signal had stopped it" if evidence.stopped else "it waited for one"
        return f"{title}: {process_title(evidence.process)}, {reason}"
    if stall.cause in ("device", "batch") and evidence.step_ms is not None and evidence.fitted_ms is not None:
        return f"{title}: {ms(evidence.step_ms)}, its work takes {ms(evidence.fitted_ms)}"
    return title


def _folded(analysis: RunAnalysis) -> str:
    """Return the title of the folded list of single stalls; "" if the list is unfolded because they cost much time."""
    lost_s = sum(analysis.stalls.lost_ms.values()) / 1000.0
    share = lost_s / analysis.run.header.wall_s if analysis.run.header.wall_s > 0 else 0.0
    if share >= LEAST_OPEN:
        return ""
    number = count(len(analysis.stalls.worst))
    return f"The {number} worst, one by one: in all stalls nobody worked for a request in {percent(share)} of the time"


def _window(run: Run, stall: Stall, number: int) -> Chart:
    import altair as alt

    cause = why(stall)
    margin_s = MARGIN * (stall.end_s - stall.start_s)
    from_s, to_s = max(0.0, stall.start_s - margin_s), stall.end_s + margin_s
    bars = [("slow gap", stall.start_s, stall.end_s, "gap", f"{ms(stall.gap_ms)} without a token")]
    bars += _longest(_steps(run.table("steps"), from_s, to_s))
    bars += _longest(_collections(run, from_s, to_s))
    bars += _longest(_without_cpu(run, from_s, to_s))
    bars += _longest(_moments("taken by the front end", "taken", run.table("receipts")["t_s"], from_s, to_s))
    tokens, ids = run.table("tokens"), run.table("requests")["id"]
    own = np.isin(tokens["request"], np.flatnonzero(ids == stall.request))
    bars += _longest(_moments("tokens of the request", "token", tokens["t_s"][own], from_s, to_s))
    name = f"stall-{number}"
    lanes = list(dict.fromkeys(bar[0] for bar in bars))
    kinds = [kind for kind in KINDS if any(bar[3] == kind for bar in bars)]
    color = alt.Scale(domain=kinds, range=[KINDS[kind] for kind in kinds])
    drawing = (
        alt.Chart(alt.NamedData(name=name), height=24 * len(lanes))
        .mark_bar(clip=True, opacity=0.85)
        .encode(
            x=alt.X(
                "from:Q",
                scale=alt.Scale(domain=[from_s, to_s], nice=False, zero=False),
                title="time since measuring began (s)",
            ),
            x2="to:Q",
            y=alt.Y("lane:N", sort=lanes, title="what happened", axis=alt.Axis(labelLimit=150)),
            color=alt.Color("kind:N", scale=color, title=None),
            tooltip=[
                alt.Tooltip("lane:N", title="what"),
                alt.Tooltip("text:N", title=" "),
                alt.Tooltip("from:Q", title="from (s)", format=".5~f"),
                alt.Tooltip("to:Q", title="to (s)", format=".5~f"),
            ],
        )
    )
    parts = sorted(stall.parts_ms.items(), key=lambda item: -item[1])
    rows = [
        (CAUSES[part], cell(part_ms, ms), Cell(percent(part_ms, stall.excess_ms), part_ms))
        for part, part_ms in parts
    ]
    lane, begin, end, kind, text = zip(*bars, strict=True)
    visible_s = LEAST_WIDTH * (to_s - from_s)
    drawn_end = [max(to, start + visible_s) for start, to in zip(begin, end, strict=True)]
    at_once = f", {count(stall.gaps)} gaps at once" if stall.gaps > 1 else ""
    return Chart(
        id=name,
        title=f"{stall.start_s:.3f} s: {ms(stall.gap_ms)} without a token",
        label=f"Request {stall.request}{at_once}. {cause[0].upper()}{cause[1:]}.",
        spec=spec_of(drawing),
        grid=grid(("part of the gap over the median", "time", "share"), rows, "What it was made of"),
        note=f"Of each lane, the {MOST_BARS} longest bars are drawn."
        if max(Counter(lane).values()) == MOST_BARS
        else "",
        data={name: columns(**{"lane": lane, "from": begin, "to": drawn_end, "kind": kind, "text": text})},
    )


def _longest(bars: Iterator[Bar]) -> list[Bar]:
    return sorted(bars, key=lambda bar: bar[1] - bar[2])[:MOST_BARS]


def _steps(steps: Table, from_s: float, to_s: float) -> Iterator[Bar]:
    end_s = steps["t_s"] + steps["step_us"] / 1e6
    for row in np.flatnonzero((end_s > from_s) & (steps["t_s"] < to_s)).tolist():
        prefill = int(steps["prefill_tokens"][row])
        text = f"{ms(steps['step_us'][row] / 1000)}, {count(steps['requests'][row])} requests"
        more = f", {count(prefill)} prompt tokens" if prefill else ""
        kind = "with prefill" if prefill else "decode only"
        yield ("EngineCore's steps", float(steps["t_s"][row]), float(end_s[row]), kind, text + more)


def _collections(run: Run, from_s: float, to_s: float) -> Iterator[Bar]:
    gc = run.table("gc")
    end_s = gc["t_s"] + np.nan_to_num(gc["pause_us"]) / 1e6
    for row in np.flatnonzero((end_s > from_s) & (gc["t_s"] < to_s)).tolist():
        text = f"generation {gc['generation'][row]}, {ms(gc['pause_us'][row] / 1000)}"
        lane = f"collections, {process_name(run, int(gc['process'][row]))}"
        yield (lane, float(gc["t_s"][row]), float(end_s[row]), "collection", text)


def _without_cpu(run: Run, from_s: float, to_s: float) -> Iterator[Bar]:
    """Yield a bar for each time between two samples in which a process was stopped or waited for a CPU."""
    memory = run.table("memory")
    for process in np.unique(memory["process"]).tolist():
        own = np.flatnonzero(memory["process"] == process)
        sampled_s, waited = memory["t_s"][own], np.nan_to_num(np.diff(memory["wait_s"][own], prepend=np.nan))
        for i in range(1, len(own)):
            if sampled_s[i] < from_s or sampled_s[i - 1] > to_s:
                continue
            stopped = memory["stopped"][own[i]] > 0
            if stopped or waited[i] >= LEAST_WAIT * (sampled_s[i] - sampled_s[i - 1]):
                text = "stopped by a signal" if stopped else f"waited {ms(waited[i] * 1000)} in this time"
                kind = "stopped" if stopped else "waited for a CPU"
                yield (
                    f"no CPU, {process_name(run, process)}",
                    float(sampled_s[i - 1]),
                    float(sampled_s[i]),
                    kind,
                    text,
                )


def _moments(lane: str, kind: str, t_s: Seconds, from_s: float, to_s: float) -> Iterator[Bar]:
    for token_s in t_s[(t_s >= from_s) & (t_s <= to_s)].tolist():
        yield (lane, token_s, token_s, kind, f"{token_s:.4f} s")
