"""Opens a page in the user's browser, for `--open`."""

from __future__ import annotations

from pathlib import Path

from kvtune import children
from kvtune.cli import notices


def open_page(page: Path) -> None:
    """Open the page, or print a line if there is no browser. The variable BROWSER names another browser."""
    if not children.browse(page.absolute().as_uri()):
        notices.always(f"kvtune: no browser here to open {page}")
        notices.always("  next: copy the page to a machine with one, or name one: BROWSER=PROGRAM kvtune ..")
