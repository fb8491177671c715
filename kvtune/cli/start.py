"""The entry point of `kvtune`. Handles signals first, because importing the rest of kvtune takes a moment.

Then makes the environment safe for the programs that libraries start (`platform` runs `uname`).
"""

from __future__ import annotations

from kvtune.base.children import guard
from kvtune.cli.signals import end_at_once


def main() -> None:
    end_at_once()
    guard()
    from kvtune.cli.app import main as app

    app()
