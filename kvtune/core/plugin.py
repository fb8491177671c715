"""Entry point that vLLM calls in each of its processes. Inert unless KVTUNE_CORE or KVTUNE_RECIPE is set."""

from __future__ import annotations


def register() -> None:
    """Load the optimized core when the environment asks for it; idempotent and cheap."""
