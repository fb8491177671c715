"""The output of `kvtune compare`: for a terminal (rich), as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.report.contrast import Contrast, difference, sentence, slow_tokens
from kvtune.report.figures import figure_table, reasons
from kvtune.report.servers import servers
from kvtune.show.parts import Grid
from kvtune.terminal import console

STYLES = {"better": "green", "worse": "red"}
TO_JUDGE = "To judge times, run the sides in turns, several times each:"
SCHEMA = 1
PIPE_WIDTH = 140  # columns where there is no terminal


def print_comparison(contrast: Contrast) -> None:
    """Print one table for each side after the first."""
    from rich.text import Text

    out = console(PIPE_WIDTH)
    first = contrast.sides[0].name
    recorded = servers(contrast)
    for at, (side, comparison) in enumerate(zip(contrast.sides[1:], contrast.comparisons, strict=True), 1):
        for line in recorded.sentences(at) if recorded is not None else ():
            out.print(Text(line))
        judged = recorded is None or bool(comparison.figures)
        if judged:
            out.print(Text(f"{side.name} against {first}: {sentence(comparison)}", style="bold"))
        for miss in comparison.mismatches:
            out.print(Text(f"! {difference(miss, first, side.name)}", style="yellow"))
        if judged:
            styles = [STYLES.get(figure.verdict, "dim") for figure in comparison.figures]
            out.print(figure_table(first, side.name, comparison.figures).fitted(gap=2, styles=styles))
        for line in reasons(comparison.figures):
            out.print(Text(line, style="dim"))
    for table in recorded.tables if recorded is not None else ():
        out.print()
        out.print(table.fitted(gap=2))
    if slow := slow_tokens(contrast.sides):
        out.print()
        out.print(slow.fitted(gap=2))
    if contrast.repeat_command:
        out.print(TO_JUDGE)
        print(f"  {contrast.repeat_command}")  # on one line, to be copied
        if contrast.left_out:
            out.print(Text(f"  {contrast.left_out}", style="dim"))


def markdown(contrast: Contrast) -> str:
    """Return Markdown tables, for a comment on a pull request. Strings from runs are escaped."""
    lines = []
    first = contrast.sides[0].name
    recorded = servers(contrast)
    for at, (side, comparison) in enumerate(zip(contrast.sides[1:], contrast.comparisons, strict=True), 1):
        said = recorded.sentences(at) if recorded is not None else []
        lines += [*(f"{_md(line)}  " for line in said), *([""] if said else [])]
        lines += [f"**{_md(side.name)}** against **{_md(first)}**: {_md(sentence(comparison))}.", ""]
        lines += [f"> {_md(difference(miss, first, side.name))}" for miss in comparison.mismatches]
        lines += [""] if comparison.mismatches else []
        lines += _md_table(figure_table(first, side.name, comparison.figures))
        lines += ["", *(f"{_md(line)}  " for line in reasons(comparison.figures)), ""]
    for table in recorded.tables if recorded is not None else ():
        lines += [*_md_table(table), ""]
    if slow := slow_tokens(contrast.sides):
        lines += [*_md_table(slow), ""]
    if contrast.repeat_command:
        lines += [TO_JUDGE, "", "```", contrast.repeat_command, "```"]
        lines += ["", _md(contrast.left_out)] if contrast.left_out else []
    return "\n".join(lines)


def plain(contrast: Contrast, failed: Sequence[str]) -> dict[str, object]:
    """Return the `--json` object: summaries, comparisons, and `failed`, the conditions of --fail-on that hold."""
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
        "servers": None if (recorded := servers(contrast)) is None else recorded.plain(),
    }


def _md_table(grid: Grid) -> list[str]:
    lines = "|".join("---:" if numeric else "---" for numeric in grid.numeric)
    rows = [[cell.text for cell in row] for row in grid.rows]
    return [_md_row(grid.heads), f"|{lines}|", *map(_md_row, rows)]


def _md_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_md(cell) for cell in cells) + " |"


def _md(text: str) -> str:
    for character in "\\`*_{}[]<>|#":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
