"""Puts the core's pool and window retention into a scheduler that vLLM has built."""

from __future__ import annotations

from kvtune.core.settings import CoreSettings


def install(settings: CoreSettings) -> None:
    """Make schedulers that are built from now on use the core's pool."""
