"""Whether this vLLM is one that the core was written against: its symbols against a manifest."""

from __future__ import annotations


def check() -> None:
    """KvtuneError naming the first symbol that differs from the manifest of this vLLM."""
