"""Prints an answer: its struct as JSON, or its Document as Markdown or for a terminal, or writes a page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtune.base import children
from kvtune.cli import notices
from kvtune.cli.options import print_json
from kvtune.data.run.signature import write_own
from kvtune.data.show.markdown import markdown
from kvtune.data.show.page import document_page
from kvtune.data.show.parts import Document
from kvtune.data.show.screen import ROWS, print_document


def print_answer(
    answer: msgspec.Struct,
    document: Document,
    *,
    json: bool,
    md: bool = False,
    page: Path | None = None,
    rows: int = ROWS,
) -> None:
    if page is not None:
        write_own(document_page(document).encode(), page, document.identity)
    if json:
        print_json(msgspec.to_builtins(answer))
    elif md:
        print(markdown(document), end="")
    else:
        print_document(document, rows)


def open_page(page: Path) -> None:
    """Open the page, or print a line if there is no browser. The variable BROWSER names another browser."""
    if not children.browse(page.absolute().as_uri()):
        notices.always(f"kvtune: no browser here to open {page}")
        notices.always("  next: copy the page to a machine with one, or name one: BROWSER=PROGRAM kvtune ..")
