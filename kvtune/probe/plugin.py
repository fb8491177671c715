"""Entry point that vLLM calls in each of its processes. Inert unless KVTUNE_PROBE is set."""

from __future__ import annotations


def register() -> None:
    """Install the instruments when the environment asks for it; idempotent and cheap."""
