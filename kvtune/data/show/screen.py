"""A Document on a terminal: plain text where there is no terminal. Nothing is said by a colour alone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtune.data.show.parts import Document, Section
from kvtune.data.show.terminal import command, console, folded, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 120
"""The columns of an answer, also where there is no terminal."""


ROWS = 40
"""The most rows of a table that a terminal shows."""


def print_document(document: Document, rows: int = ROWS) -> None:
    from rich.console import Group

    out = console(WIDTH)
    out.print(Group(*document_view(document, min(WIDTH, out.width), rows)), crop=False)


def document_lines(document: Document, width: int = WIDTH) -> list[str]:
    """Return the document as lines of plain text. Only commands may be wider than `width`."""
    from rich.console import Group

    out = io.StringIO()
    console(width, file=out).print(Group(*document_view(document, width)), crop=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def document_view(document: Document, width: int, rows: int = ROWS) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(_paragraph(document.headline, width), style="bold")
    for banner in document.banners:
        title = f"{banner.title}{'' if banner.title.endswith('.') else ':'}"
        prefix, style = ("", "dim") if banner.css == "info" else ("! ", "yellow")
        yield Text(_paragraph(f"{prefix}{title} {banner.text}", width), style=style)
        for line in banner.lines:
            yield Text(_paragraph(f"  {line}", width), style=style)
    for section in document.sections:
        yield from section_view(section, width, rows)
    if document.closing:
        yield Text(f"\n{_paragraph(document.closing, width)}", style="dim")


def section_view(section: Section, width: int, rows: int = ROWS) -> Iterator[RenderableType]:
    """Yield a section's title, facts, tables and notes. A section without any is left out."""
    from rich.text import Text

    tables = section.in_words
    if tables is None:
        return
    yield Text(f"\n{one_line(section.title)}", style="bold")
    if section.lead:
        yield Text(_paragraph(section.lead, width))
    tiles = ((tile.name, f"{tile.value} {tile.more}".strip()) for tile in section.tiles)
    yield from facts_view((*tiles, *section.facts), width)
    for number, table in enumerate(tables):
        if len(tables) > 1 and table.caption:
            yield Text(f"\n{one_line(table.caption)}" if number else one_line(table.caption))
        elif number:
            yield Text()
        yield replace(table, rows=table.rows[:rows]).fitted(gap=2)
        if more := len(table.rows[rows:]):
            yield Text(f"{more} more rows: --json lists all.", style="dim")
    for note in section.notes:
        yield Text(_paragraph(note, width))
    for what, text in section.asked:
        yield from [Text(_paragraph(what, width))] if what else []
        yield command(f"  {text}", "cyan")


def facts_view(facts: tuple[tuple[str, str], ...], width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    room = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        yield Text(_paragraph(f"{name:<{room}}  {value}", width))


def _paragraph(text: str, width: int) -> str:
    return "\n".join(folded(one_line(text), width))
