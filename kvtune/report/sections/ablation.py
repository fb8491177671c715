"""The results of `--ablate`: what toggling each switch changed, and which changes are more than chance."""

from __future__ import annotations

from functools import partial

from kvtune.analysis.comparison.ablation import FIGURES as COMPARED
from kvtune.analysis.comparison.ablation import Ablation, AblationSide, stored
from kvtune.analysis.comparison.compare import Figure
from kvtune.analysis.figures import FIGURES
from kvtune.analysis.run import RunAnalysis
from kvtune.knobs import CORE
from kvtune.report.figures import forest, judged
from kvtune.show.parts import Cell, Chart, Grid, Section, cell, grid
from kvtune.terminal import Column

PLACE = 90


def section(analysis: RunAnalysis) -> Section | None:
    ablation = stored(analysis.run)
    if ablation is None or not ablation.turned:
        return None
    failed = [f"{side.name}: {why}" for side in (ablation.baseline, *ablation.turned) for why in side.failed]
    notes = [
        "Each cell is the change against the baseline. Better and worse mean that its 95 % interval over whole, "
        "interleaved runs excludes zero, = that it includes zero. Less is better in every column."
    ]
    if ablation.why:
        notes.append(f"{ablation.done} of {ablation.planned} runs were made: {ablation.why}.")
    notes += [f"A run failed. {line}" for line in failed]
    about = tuple(_about(side) for side in ablation.turned)
    return Section(
        id="ablation",
        title="What each switch is worth",
        lead=_lead(ablation),
        tables=(_table(ablation, intervals=False),),
        notes=tuple(notes),
        facts=about,
        draw=lambda: (_forest(ablation, number, name) for number, name in enumerate(COMPARED)),
        beside=True,
        terminal=(
            _table(ablation, intervals=True),
            "\n".join((*notes, *(f"{name}: {what}" for name, what in about))),
        ),
    )


def _lead(ablation: Ablation) -> str:
    sentences = []
    for verdict, word in (("worse", "Worse when toggled"), ("better", "Better when toggled")):
        changes = [
            f"{_name(side)} ({', '.join(names)})"
            for side in ablation.turned
            if (names := [FIGURES[w.path].title for w in side.worths if w.verdict == verdict])
        ]
        if changes:
            sentences.append(f"{word}: {'; '.join(changes)}.")
    few = [s for s in ablation.turned if all(w.verdict == "not judged" for w in s.worths)]
    quiet = [
        side
        for side in ablation.turned
        if side not in few and all(w.verdict not in ("worse", "better") for w in side.worths)
    ]
    for sides, words in ((quiet, "No difference shown"), (few, "Too few runs to tell")):
        if sides:
            sentences.append(f"{words}: {', '.join(side.name for side in sides)}.")
    return " ".join(sentences)


def _name(side: AblationSide) -> str:
    return f"{side.name} {side.turned}"


def _table(ablation: Ablation, *, intervals: bool) -> Grid:
    """Make the table. `intervals`: print them in the cells, for a terminal; a page draws them as charts."""
    runs = len(ablation.baseline.runs)
    rows: list[tuple[object, ...]] = [
        ("baseline", Cell(str(runs), runs), *map(_baseline, ablation.turned[0].worths)),
    ]
    rows += [
        (
            _name(side),
            Cell(str(len(side.runs)), len(side.runs)),
            *(_cell(worth, intervals) for worth in side.worths),
        )
        for side in ablation.turned
    ]
    heads = [Column("toggled", folds=True), Column("runs", rank=len(COMPARED))]
    heads += [Column(FIGURES[name].short, folds=True, least=16, rank=at) for at, name in enumerate(COMPARED)]
    return grid(heads, rows, "Each switch toggled, against the baseline")


def _baseline(worth: Figure) -> Cell:
    return cell(worth.a, FIGURES[worth.path].text)


def _cell(worth: Figure, interval: bool) -> Cell:
    if worth.difference is None:
        return Cell("–")
    word = {"no difference shown": " =", "not judged": ""}.get(worth.verdict, f" {worth.verdict}")
    css = worth.verdict if worth.verdict in ("better", "worse") else "quiet"
    text = _whole(worth) if interval else FIGURES[worth.path].text(worth.difference, signed=True)
    return Cell(text + word, worth.difference, css)


def _about(side: AblationSide) -> tuple[str, str]:
    knob = CORE.get(side.name)
    return side.name, knob.help if knob is not None else "the thresholds of Python's collector"


def _whole(worth: Figure) -> str:
    """Return a change and its interval as text."""
    text = partial(FIGURES[worth.path].text, signed=True)
    if worth.low is None or worth.high is None:
        return f"{text(worth.difference)} (too few runs)"
    return f"{text(worth.difference)} ({text(worth.low)} to {text(worth.high)})"


def _forest(ablation: Ablation, number: int, figure: str) -> Chart | None:
    rows = [(_name(side), worth) for side in ablation.turned if judged(worth := side.worths[number])]
    if not rows:
        return None
    most, worth = max(rows, key=lambda row: abs(row[1].difference or 0.0))
    label = f"Largest change: {most}, {_whole(worth)}; {worth.verdict}."
    title = FIGURES[figure].title
    heads = ("toggled", "change against the baseline (%)")
    return forest(f"ablation-{number}", f"{title[:1].upper()}{title[1:]}", label, heads, rows)
