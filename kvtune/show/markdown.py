"""A Document as Markdown, for a pull request or an issue: headline, sections, tables with pipes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvtune.show.parts import Document, Grid, Section
from kvtune.terminal import one_line

SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def markdown(document: Document) -> str:
    return "\n\n".join(_blocks(document)) + "\n"


def _blocks(document: Document) -> Iterator[str]:
    yield f"# {_text(f'{document.name}: {document.subject}')}"
    yield f"**{_text(document.headline)}**"
    for banner in document.banners:
        yield f"> **{_text(banner.title)}** {_text(banner.text)}"
    for section in document.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    tables = [table.filled() for table in section.tables if table.rows]
    if not (section.lead or section.facts or tables or section.notes or section.commands):
        return
    yield f"## {_text(section.title)}"
    if section.lead:
        yield _text(section.lead)
    if section.facts:
        yield "\n".join(f"- {_text(name)}: {_text(value)}" for name, value in section.facts)
    yield from map(_table, tables)
    if section.notes:
        yield "\n".join(f"- {_text(note)}" for note in section.notes)
    if section.commands:
        yield "\n".join(("```", *map(one_line, section.commands), "```"))


def _table(table: Grid) -> str:
    rule = (" ---: " if numeric else " --- " for numeric in table.numeric)
    rows = [
        _row(table.heads),
        f"|{'|'.join(rule)}|",
        *(_row([cell.text for cell in row]) for row in table.rows),
    ]
    return "\n".join(rows)


def _row(texts: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(map(_text, texts))} |"


def _text(text: str) -> str:
    """Return a text that Markdown shows as it is, on one line."""
    return SPECIAL.sub(r"\\\1", one_line(text))
