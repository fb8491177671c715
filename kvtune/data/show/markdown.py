"""A Document as Markdown, for a pull request or an issue: headline, sections, tables with pipes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvtune.data.show.parts import Document, Grid, Section
from kvtune.data.show.terminal import one_line

SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def markdown(document: Document) -> str:
    return "\n\n".join(_blocks(document)) + "\n"


def _blocks(document: Document) -> Iterator[str]:
    yield f"# {_text(f'{document.name}: {document.subject}')}"
    yield f"**{_text(document.headline)}**"
    for banner in document.banners:
        lines = (f"> - {_text(line)}" for line in banner.lines)
        yield "\n".join((f"> **{_text(banner.title)}** {_text(banner.text)}", *lines))
    for section in document.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    tables = section.in_words
    if tables is None:
        return
    yield f"## {_text(section.title)}"
    if section.lead:
        yield _text(section.lead)
    tiles = ((tile.name, f"{tile.value} {tile.more}".strip()) for tile in section.tiles)
    if facts := [*tiles, *section.facts]:
        yield "\n".join(f"- {_text(name)}: {_text(value)}" for name, value in facts)
    for table in tables:
        if len(tables) > 1 and table.caption:
            yield _text(table.caption)
        yield _table(table)
    if section.notes:
        yield "\n".join(f"- {_text(note)}" for note in section.notes)
    for what, text in section.asked:
        yield from [_text(what)] if what else []
        yield f"```\n{one_line(text)}\n```"


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
