"""What `kvtune compare` answers: its `--json`, and the document for terminal, page and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvtune.base.units import ms, percent
from kvtune.data.run.signature import run_identity
from kvtune.data.show.charts import SERIES, columns, spec_of
from kvtune.data.show.parts import Banner, Cell, Chart, Document, Section, cell, grid
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.again import repeating
from kvtune.reading.analysis.cache import rounds
from kvtune.reading.analysis.comparison.compare import Figure, Mismatch
from kvtune.reading.analysis.figures import TIMES
from kvtune.reading.analysis.latency import itl_ms, ttft_ms
from kvtune.reading.analysis.spread import Values
from kvtune.reading.report.banners import NOTES, banners
from kvtune.reading.report.contrast import Contrast, sentence, slow_tokens
from kvtune.reading.report.figures import figure_table, forest, judged, reasons
from kvtune.reading.report.names import load_text, when
from kvtune.reading.report.servers import Servers, servers

if TYPE_CHECKING:
    import altair as alt

QUANTILES = np.linspace(0, 1, 201)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A side after the first: the checked fields and the figures in which it differs."""

    name: str
    mismatches: tuple[Mismatch, ...]
    figures: tuple[Figure, ...]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """`runs`: each run's `--json` and the name of its side. `failed`: conditions of --fail-on that hold."""

    schema: int = 1
    comparable: bool
    runs: list[dict[str, Any]]
    comparisons: list[Side]
    failed: list[str]
    repeat_command: str
    servers: Servers | None


def compared(contrast: Contrast, failed: Sequence[str]) -> Compared:
    return Compared(
        comparable=not contrast.differences,
        runs=[{"name": side.name, **summary} for side in contrast.sides for summary in side.summaries],
        comparisons=[
            Side(name=side.name, mismatches=c.mismatches, figures=c.figures) for side, c in contrast.others
        ],
        failed=list(failed),
        repeat_command=contrast.repeat_command,
        servers=servers(contrast),
    )


def document(contrast: Contrast) -> Document:
    header, recorded = contrast.sides[0].run.header, servers(contrast)
    names = " against ".join((", ".join(side.name for side in contrast.sides[1:]), contrast.sides[0].name))
    return Document(
        name="kvtune compare",
        subject=names,
        headline=_headline(contrast, recorded),
        sections=tuple(_sections(contrast, recorded)),
        identity=run_identity(header),
        title=f"{names} · {header.model} · kvtune",
        banners=tuple(_banners(contrast)),
    )


def _headline(contrast: Contrast, recorded: Servers | None) -> str:
    """Return what is better and what is worse, a sentence for each side after the first."""
    sentences = []
    for number, (side, comparison) in enumerate(contrast.others, start=1):
        facts = recorded.server if recorded else ()
        hits = [f"hits {fact.texts[0]} -> {fact.texts[number]}" for fact in facts if fact.name == "hit"]
        outcome = [sentence(comparison)] if comparison.figures or not recorded else []
        sentences.append(f"{side.name} against {contrast.sides[0].name}: {'; '.join(hits + outcome)}.")
    return " ".join(sentences)


def _banners(contrast: Contrast) -> Iterator[Banner]:
    """Yield the checked fields that differ, and the warnings of each side's runs."""
    if contrast.differences:
        text = f"{'; '.join(contrast.differences)}. A difference in a figure may not come from the settings."
        yield Banner("bad", "These runs did not do the same work.", text)
    for side in contrast.sides:
        for banner in dict.fromkeys(b for run in side.runs for b in banners(run) if b.title != NOTES):
            yield Banner(banner.css, f"{side.name}: {banner.title}", banner.text)


def _sections(contrast: Contrast, recorded: Servers | None) -> Iterator[Section]:
    if recorded is not None:
        yield Section(
            id="servers",
            title="Traffic and server",
            lead=" ".join(
                line for side in range(1, len(recorded.names)) for line in recorded.sentences(side)
            ),
            tables=recorded.tables,
        )
    yield _figures(contrast)
    slow = slow_tokens(contrast.sides)
    if slow is not None:
        lead = "A gap between two tokens is slow if it is longer than twice the side's median. For each cause: how "
        lead += "many gaps, their time over the median, and its share. Of several runs, the mean."
        yield Section("stalls", "Slow tokens", lead, tables=(slow,))
    yield Section("latency", "Latency", draw=lambda: _distributions(contrast), beside=True)
    if any(rounds(side.run) for side in contrast.sides):
        yield Section("cache", "Prefix cache", draw=lambda: [_rounds(contrast)])
    yield _differences(contrast, repeats=recorded is None)
    if contrast.repeat_command:
        yield Section(
            "repeat",
            "To judge times",
            "Run the sides in turns, several times each.",
            notes=(contrast.left_out,) if contrast.left_out else (),
            commands=(contrast.repeat_command,),
        )


def _figures(contrast: Contrast) -> Section:
    first = contrast.sides[0].name
    notes = [line for comparison in contrast.comparisons for line in reasons(comparison.figures)]
    if contrast.repeated:
        numbers = ", ".join(f"{len(side.runs)} of {side.name}" for side in contrast.sides)
        notes.append(f"The intervals come from repeated runs ({numbers}). They include this machine's drift.")
    elif contrast.times_judged:
        notes.append("Times are predicted: they are the same at every repetition.")
    if any(map(judged, (f for comparison in contrast.comparisons for f in comparison.figures))):
        notes.append("Better and worse mean that the 95 % interval of the difference excludes zero.")
    return Section(
        id="figures",
        title="Figures",
        tables=tuple(figure_table(first, side.name, c.figures) for side, c in contrast.others if c.figures),
        notes=tuple(dict.fromkeys(notes)),
        draw=lambda: (
            forest(number, first, side.name, comparison.figures, points=points)
            for number, (side, comparison) in enumerate(contrast.others, start=1)
            for points in (True, False)
        ),
    )


def _distributions(contrast: Contrast) -> Iterator[Chart | None]:
    for name, noun, observe in (("ttft", "requests", ttft_ms), ("itl", "gaps", itl_ms)):
        of_sides = {side.name: side.values(observe) for side in contrast.sides}
        finite = {side: values[np.isfinite(values)] for side, values in of_sides.items()}
        drawn = {side: values for side, values in finite.items() if len(values) > 1}
        yield _quantiles(name, noun, drawn) if len(drawn) > 1 else None


def _quantiles(name: str, noun: str, sides: dict[str, Values]) -> Chart:
    import altair as alt

    title, low = TIMES[f"{name}_ms"][0].capitalize(), min(float(values.min()) for values in sides.values())
    wide = low > 0 and max(float(values.max()) for values in sides.values()) / low > 30
    data = columns(
        ms=np.concatenate([np.quantile(values, QUANTILES) for values in sides.values()]),
        share=np.tile(100 * QUANTILES, len(sides)),
        run=[side for side in sides for _ in QUANTILES],
    )
    scale = alt.Scale(type="log", nice=False) if wide else alt.Scale(zero=False, nice=False)
    drawing = (
        alt.Chart(alt.NamedData(name=name), height=210)
        .mark_line(strokeWidth=2, interpolate="step-after")
        .encode(
            x=alt.X("ms:Q", scale=scale, title="milliseconds" + (" (logarithmic)" if wide else "")),
            y=alt.Y("share:Q", title=f"share of {noun} (%)"),
            order="share:Q",
            color=_run_colors(list(sides)),
            strokeDash=alt.StrokeDash("run:N", legend=None),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("share:Q", title="share that took at most this (%)", format=".1f"),
                alt.Tooltip("ms:Q", title="milliseconds", format=",.4~g"),
            ],
        )
    )
    medians = ", ".join(f"{side} {ms(float(np.median(values)))}" for side, values in sides.items())
    label = f"Medians: {medians}. A line shows the share of {noun} that took at most so long; further left is better."
    rows = [
        (f"{share} %", *(cell(float(np.percentile(values, share)), ms) for values in sides.values()))
        for share in (0, 10, 25, 50, 75, 90, 95, 99, 100)
    ]
    return Chart(name, title, label, spec_of(drawing), grid(("share", *sides), rows, title), {name: data})


def _rounds(contrast: Contrast) -> Chart:
    import altair as alt

    sides = {side.name: rounds(side.run) for side in contrast.sides}
    flat = [(name, r) for name, each in sides.items() for r in each]
    data = columns(
        run=[name for name, _ in flat],
        round=[f"round {r.round + 1}" for _, r in flat],
        rate=[100 * (r.rate or 0.0) for _, r in flat],
    )
    drawing = (
        alt.Chart(alt.NamedData(name="rounds"), height=190)
        .mark_bar()
        .encode(
            x=alt.X("round:N", sort=None, axis=alt.Axis(title="round", labelAngle=0)),
            xOffset=alt.XOffset("run:N", sort=list(sides)),
            y=alt.Y("rate:Q", title="hit rate (%)", scale=alt.Scale(domain=[0, 100])),
            color=_run_colors(list(sides)),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("round:N"),
                alt.Tooltip("rate:Q", title="hit rate (%)", format=".1f"),
            ],
        )
    )
    cells = [{r.round: cell(r.rate, percent) for r in each} for each in sides.values()]
    rows = [
        (Cell(f"round {number + 1}", number), *(by_round.get(number, "–") for by_round in cells))
        for number in sorted({r.round for _, r in flat})
    ]
    totals = ", ".join(
        f"{name} {percent(sum(r.hit_tokens for r in each), sum(r.query_tokens for r in each))}"
        for name, each in sides.items()
    )
    table = grid(("round", *sides), rows, "Hit rate by round")
    title = "Hit rate in each round"
    return Chart("rounds", title, f"Over all rounds: {totals}.", spec_of(drawing), table, {"rounds": data})


def _run_colors(names: list[str]) -> alt.Color:
    import altair as alt

    colors = [SERIES[number % len(SERIES)] for number in range(len(names))]
    return alt.Color("run:N", title=None, scale=alt.Scale(domain=names, range=colors))


def _differences(contrast: Contrast, *, repeats: bool) -> Section:
    checked: dict[str, list[str]] = {}
    for number, comparison in enumerate(contrast.comparisons, start=1):
        for miss in comparison.mismatches:
            checked.setdefault(miss.field, [miss.a] * len(contrast.sides))[number] = miss.b
    rows = [
        (f"{field}, checked", *(Cell(v, css="differs" if v != row[0] else "") for v in row))
        for field, row in checked.items()
    ]
    rows += [(name, *map(Cell, values)) for name, values in contrast.differing if name not in checked]
    lead = "Everything else that was checked and recorded is equal."
    if not rows and repeats:
        lead = "Nothing that was recorded differs: these are repetitions of one run."
    started = (dict.fromkeys(when(run.header.started_at) for run in side.runs) for side in contrast.sides)
    rows.append(("started", *(Cell(", ".join(times)) for times in started)))
    columns = (
        Column(name, right=False, folds=True, least=12)
        for name in ("field", *(side.name for side in contrast.sides))
    )
    again = dict.fromkeys(filter(None, (repeating(side.run) for side in contrast.sides)))
    loads = dict.fromkeys(load_text(side.run.header.workload) for side in contrast.sides)
    return Section(
        "differences",
        "Settings that differ",
        lead,
        tables=(grid(tuple(columns), rows),),
        facts=tuple(("load", load) for load in loads if load),
        commands=tuple(again),
    )
