"""The sections of a comparison's page: outcome, figures, distributions, slow tokens, rounds, settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtune.analysis.again import repeating
from kvtune.analysis.cache import rounds
from kvtune.analysis.comparison.compare import Comparison
from kvtune.analysis.figures import quantity
from kvtune.analysis.latency import itl_ms, ttft_ms
from kvtune.analysis.spread import Values
from kvtune.report.contrast import Contrast, RunGroup, sentence, slow_tokens
from kvtune.report.figures import figure_table, forest, in_points, judged, reasons
from kvtune.report.names import command_text, when
from kvtune.report.servers import servers
from kvtune.show.charts import SERIES, columns, spec_of
from kvtune.show.parts import Cell, Chart, Section, grid
from kvtune.units import ms, percent

if TYPE_CHECKING:
    import altair as alt

QUANTILES = np.linspace(0, 1, 201)


def sections(contrast: Contrast) -> list[Section]:
    made = [
        _outcome(contrast),
        _servers(contrast),
        _figures(contrast),
        _distributions(contrast),
        _stalls(contrast),
        _rounds(contrast),
        _differences(contrast),
    ]
    return [section for section in made if section is not None]


def _outcome(contrast: Contrast) -> Section:
    first = contrast.sides[0].name
    lines = [
        (side.name, f"Against {first}: {sentence(comparison)}.")
        for side, comparison in zip(contrast.sides[1:], contrast.comparisons, strict=True)
    ]
    note = "Better and worse mean that the 95 % interval of the difference excludes zero. "
    if contrast.repeated:
        numbers = ", ".join(f"{len(side.runs)} of {side.name}" for side in contrast.sides)
        note += f"The intervals come from repeated runs ({numbers}), so they include this machine's drift."
    elif contrast.times_judged:
        note += "Times are predicted: they are the same at every repetition."
    else:
        note += (
            "Times of one run a side are not judged: a machine that was slower during one whole run looks like a "
            "difference. Runs of both sides in turns (A B A B) separate the two."
        )
    values = {"lines": lines, "note": note, "command": contrast.repeat_command, "without": contrast.left_out}
    return Section("outcome", "What differs", "", "outcome.html", values=values)


def _servers(contrast: Contrast) -> Section | None:
    recorded = servers(contrast)
    if recorded is None:
        return None
    return Section(
        id="servers",
        title="Traffic and server",
        lead=" ".join(
            f"{name}: {' '.join(recorded.sentences(at))}" for at, name in enumerate(recorded.names[1:], 1)
        ),
        tables=recorded.tables,
    )


def _figures(contrast: Contrast) -> Section:
    first = contrast.sides[0].name
    pairs = list(zip(contrast.sides[1:], contrast.comparisons, strict=True))
    tables = [figure_table(first, side.name, comparison.figures) for side, comparison in pairs]
    why = dict.fromkeys(line for comparison in contrast.comparisons for line in reasons(comparison.figures))
    return Section(
        id="figures",
        title="Figures",
        lead=f"Differences are relative to {first}.",
        tables=tuple(tables),
        notes=tuple(why),
        draw=lambda: (
            _forest(number, first, side.name, comparison, points)
            for number, (side, comparison) in enumerate(pairs, start=1)
            for points in (True, False)
        ),
    )


def _forest(number: int, first: str, other: str, comparison: Comparison, points: bool) -> Chart | None:
    """Draw the figures whose differences are in percentage points, or the others; None if there are none."""
    rows = [(quantity(f.path).title, f) for f in comparison.figures if judged(f) and in_points(f) == points]
    unit, name = ("percentage points", f"points-{number}") if points else ("%", f"figures-{number}")
    label = f"Dots are differences, bars their 95 % intervals. {other} is {sentence(comparison)}."
    heads = ("figure", f"difference of {other} from {first} ({unit})")
    return forest(name, f"{other} against {first}", label, heads, rows) if rows else None


def _distributions(contrast: Contrast) -> Section | None:
    ttft, itl = ([(s.name, s.values(of)) for s in contrast.sides] for of in (ttft_ms, itl_ms))
    drawn = (
        _quantiles("ttft", "Time to first token", "requests", ttft),
        _quantiles("itl", "Time between tokens", "gaps", itl),
    )
    if drawn == (None, None):
        return None
    return Section(
        id="latency",
        title="Latency",
        lead="Each line shows the share of requests or gaps that took at most that long; further left is better.",
        draw=lambda: drawn,
        beside=True,
    )


def _quantiles(name: str, title: str, noun: str, runs: list[tuple[str, Values]]) -> Chart | None:
    import altair as alt

    finite = [(label, values[np.isfinite(values)]) for label, values in runs]
    finite = [(label, values) for label, values in finite if len(values) > 1]
    if len(finite) < 2:
        return None
    low = min(float(values.min()) for _, values in finite)
    wide = low > 0 and max(float(values.max()) for _, values in finite) / low > 30
    lines = [(label, np.quantile(values, QUANTILES)) for label, values in finite]
    data = columns(
        ms=np.concatenate([line for _, line in lines]),
        share=np.tile(100 * QUANTILES, len(lines)),
        run=[label for label, line in lines for _ in line],
    )
    scale = alt.Scale(type="log", nice=False) if wide else alt.Scale(zero=False, nice=False)
    drawing = (
        alt.Chart(alt.NamedData(name=name), height=210)
        .mark_line(strokeWidth=2, interpolate="step-after")
        .encode(
            x=alt.X("ms:Q", scale=scale, title="milliseconds" + (" (logarithmic)" if wide else "")),
            y=alt.Y("share:Q", title=f"share of {noun} (%)"),
            order="share:Q",
            color=_run_colors([label for label, _ in lines]),
            strokeDash=alt.StrokeDash("run:N", legend=None),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("share:Q", title="share that took at most this (%)", format=".1f"),
                alt.Tooltip("ms:Q", title="milliseconds", format=",.4~g"),
            ],
        )
    )
    label = (
        "Medians: " + ", ".join(f"{label} {ms(float(np.median(values)))}" for label, values in finite) + "."
    )
    marks = (0, 10, 25, 50, 75, 90, 95, 99, 100)
    rows = [
        (f"{mark} %", *(Cell(ms(q := float(np.percentile(values, mark))), q) for _, values in finite))
        for mark in marks
    ]
    table = grid(("share", *(label for label, _ in finite)), rows, title)
    return Chart(name, title, label, spec_of(drawing), table, {name: data})


def _stalls(contrast: Contrast) -> Section | None:
    table = slow_tokens(contrast.sides)
    if table is None:
        return None
    return Section(
        id="stalls",
        title="Slow tokens",
        lead="Gaps between deliveries of tokens that are longer than twice the side's median, by their largest cause: "
        "how many, the cause's time over the median, its share. Of several runs, the mean.",
        tables=(table,),
    )


def _rounds(contrast: Contrast) -> Section | None:
    import altair as alt

    sides = [(side.name, rounds(side.run)) for side in contrast.sides]
    if not any(side_rounds for _, side_rounds in sides):
        return None
    data = columns(
        run=[name for name, side_rounds in sides for _ in side_rounds],
        round=[f"round {r.round + 1}" for _, side_rounds in sides for r in side_rounds],
        rate=[100 * r.hit_tokens / max(r.query_tokens, 1) for _, side_rounds in sides for r in side_rounds],
    )
    drawing = (
        alt.Chart(alt.NamedData(name="rounds"), height=190)
        .mark_bar()
        .encode(
            x=alt.X("round:N", sort=None, axis=alt.Axis(title="round", labelAngle=0)),
            xOffset=alt.XOffset("run:N", sort=[name for name, _ in sides]),
            y=alt.Y("rate:Q", title="hit rate (%)", scale=alt.Scale(domain=[0, 100])),
            color=_run_colors([name for name, _ in sides]),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("round:N"),
                alt.Tooltip("rate:Q", title="hit rate (%)", format=".1f"),
            ],
        )
    )
    numbers = sorted({r.round for _, side_rounds in sides for r in side_rounds})
    by_round = [{r.round: r for r in side_rounds} for _, side_rounds in sides]
    rows = [
        (
            Cell(f"round {n + 1}", n),
            *(
                Cell(
                    percent(side_rounds[n].hit_tokens, side_rounds[n].query_tokens),
                    side_rounds[n].hit_tokens / max(side_rounds[n].query_tokens, 1),
                )
                if n in side_rounds
                else "–"
                for side_rounds in by_round
            ),
        )
        for n in numbers
    ]
    totals = ", ".join(
        f"{name} {percent(sum(r.hit_tokens for r in side_rounds), sum(r.query_tokens for r in side_rounds))}"
        for name, side_rounds in sides
    )
    table = grid(("round", *(name for name, _ in sides)), rows, "Hit rate by round")
    label = f"Over all rounds: {totals}."
    chart = Chart("rounds", "Hit rate in each round", label, spec_of(drawing), table, {"rounds": data})
    return Section("cache", "Prefix cache", draw=lambda: (chart,))


def _run_colors(names: list[str]) -> alt.Scale:
    import altair as alt

    return alt.Color(
        "run:N", title=None, scale=alt.Scale(domain=names, range=[SERIES[i % 8] for i in range(len(names))])
    )


def _differences(contrast: Contrast) -> Section:
    heads = ("field", *(side.name for side in contrast.sides))
    checked: dict[str, list[str]] = {}
    for number, comparison in enumerate(contrast.comparisons, start=1):
        for miss in comparison.mismatches:
            checked.setdefault(miss.field, [miss.a] * len(contrast.sides))[number] = miss.b
    wrong = [
        (field, *(Cell(v, css="differs" if v != row[0] else "") for v in row))
        for field, row in checked.items()
    ]
    rows = [(name, *values) for name, values in contrast.differing if name not in checked]
    return Section(
        id="differences",
        title="Settings that differ",
        lead="Everything else that was checked and recorded is equal."
        if rows or wrong
        else "Nothing that was recorded differs: these are repetitions of one run.",
        template="differences.html",
        tables=tuple(
            grid(heads, found, caption)
            for found, caption in (
                (wrong, "Checked fields that differ"),
                (rows, "Recorded settings that differ"),
            )
            if found
        ),
        values={
            "commands": [
                (s.name, repeating(s.run), command_text(s.run), _started(s)) for s in contrast.sides
            ],
        },
    )


def _started(side: RunGroup) -> str:
    return ", ".join(when(run.header.started_at) for run in side.runs)
