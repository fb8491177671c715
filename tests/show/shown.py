"""A Document as a terminal of a given width shows it."""

from __future__ import annotations

import io

from kvtune.show.parts import Document
from kvtune.show.screen import WIDTH, document_view
from kvtune.terminal import console


def shown(document: Document, width: int = WIDTH) -> list[str]:
    out = io.StringIO()
    for part in document_view(document, width):
        console(width, file=out).print(part, crop=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]
