"""A comparison for a terminal (rich), as Markdown and as JSON: what `kvtune compare` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvtune.analysis.comparison.compare import Comparison
from kvtune.report.contrast import Contrast, difference, sentence
from kvtune.report.measures import change_text, interval_text, measure_text, measure_title, reasons
from kvtune.report.stalls import side_by_side
from kvtune.terminal import Column, FittedTable, console

STYLES = {"better": "green", "worse": "red", "no difference shown": "dim", "not judged": "dim"}
TO_JUDGE = "To judge times, run the sides in turns, several times each:"
STALLS = "slow tokens, by largest cause"
SCHEMA = 1
PIPE_WIDTH = 140  # columns where there is no terminal


def print_comparison(contrast: Contrast) -> None:
    """Print one table for each run after the first."""
    from rich.text import Text

    out = console(PIPE_WIDTH)
    first = contrast.sides[0].name
    for side, comparison in zip(contrast.sides[1:], contrast.comparisons, strict=True):
        out.print(Text(f"{side.name} against {first}: {sentence(comparison)}", style="bold"))
        for miss in comparison.mismatches:
            out.print(Text(f"! {difference(miss, first, side.name)}", style="yellow"))
        rows = _rows(comparison)
        out.print(FittedTable(_columns(first, side.name), rows, [STYLES[row[-1]] for row in rows], gap=2))
        for line in reasons(comparison.figures):
            out.print(Text(line, style="dim"))
    if rows_of_stalls := side_by_side([side.summaries for side in contrast.sides]):
        sides = [Column(side.name, right=False, folds=True) for side in contrast.sides]
        out.print()
        out.print(FittedTable([Column(STALLS, folds=True, least=22), *sides], rows_of_stalls, gap=2))
    if contrast.repeat_command:
        out.print(TO_JUDGE)
        print(f"  {contrast.repeat_command}")  # on one line, to be copied


ALIGN: tuple[Literal["left", "right"], ...] = ("left", "right", "right", "right", "left", "left")


def markdown(contrast: Contrast) -> str:
    """Markdown tables, for a pull request's comment. Strings from runs are escaped."""
    lines = []
    first = contrast.sides[0].name
    for side, comparison in zip(contrast.sides[1:], contrast.comparisons, strict=True):
        lines += [f"**{_md(side.name)}** against **{_md(first)}**: {_md(sentence(comparison))}.", ""]
        lines += [f"> {_md(difference(miss, first, side.name))}" for miss in comparison.mismatches]
        lines += [""] if comparison.mismatches else []
        lines.append(_md_row(_heads(first, side.name)))
        lines.append("|" + "|".join("---:" if align == "right" else "---" for align in ALIGN) + "|")
        lines += [_md_row(row) for row in _rows(comparison)]
        lines += ["", *(f"{_md(line)}  " for line in reasons(comparison.figures)), ""]
    if rows_of_stalls := side_by_side([side.summaries for side in contrast.sides]):
        lines += [_md_row((STALLS, *(side.name for side in contrast.sides)))]
        lines += ["|---|" + "---|" * len(contrast.sides), *map(_md_row, rows_of_stalls), ""]
    if contrast.repeat_command:
        lines += [TO_JUDGE, "", "```", contrast.repeat_command, "```"]
    return "\n".join(lines)


def plain(contrast: Contrast, failed: Sequence[str]) -> dict[str, object]:
    """The `--json` object: summaries of all runs, the comparisons with the first, the conditions that hold."""
    return {
        "schema": SCHEMA,
        "comparable": contrast.comparable,
        "runs": [{"name": side.name, **summary} for side in contrast.sides for summary in side.summaries],
        "comparisons": [
            {"name": side.name, **comparison.plain()}
            for side, comparison in zip(contrast.sides[1:], contrast.comparisons, strict=True)
        ],
        "failed": list(failed),
        "repeat_command": contrast.repeat_command,
    }


def _columns(first: str, other: str) -> list[Column]:
    """The columns. On a narrow terminal the interval is left out, as the verdict says what it shows."""
    figure, a, b, difference, interval, verdict = _heads(first, other)
    return [
        Column(figure, folds=True, least=22),
        Column(a),
        Column(b),
        Column(difference),
        Column(interval, right=False, rank=1),
        Column(verdict, right=False, folds=True, least=13),
    ]


def _heads(first: str, other: str) -> tuple[str, ...]:
    return ("figure", first, other, "difference", "95 % interval", "verdict")


def _rows(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            measure_title(f.path),
            measure_text(f.path, f.a),
            measure_text(f.path, f.b),
            change_text(f),
            interval_text(f),
            f.verdict,
        )
        for f in comparison.figures
    ]


def _md_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_md(cell) for cell in cells) + " |"


def _md(text: str) -> str:
    for character in "\\`*_{}[]<>|#":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
