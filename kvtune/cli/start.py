"""The entry point of `kvtune`. Handles signals first, because importing the rest of kvtune takes a moment."""

from __future__ import annotations

from kvtune.cli.signals import end_at_once


def main() -> None:
    end_at_once()
    from kvtune.cli.app import main as app

    app()
