"""The mean of the summaries of repeated runs: every number that all of them have; the rest as in the first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def average(found: Sequence[Any]) -> Any:
    """Of equal objects, lists and numbers, leaf by leaf. None where any of them has no number."""
    first = found[0]
    if isinstance(first, Mapping):
        return {key: average([f[key] for f in found if key in f]) for key in first}
    if isinstance(first, list):
        fewest = min(len(f) for f in found)
        return [average([f[i] for f in found]) for i in range(fewest)]
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        return first
    numbers = [f for f in found if isinstance(f, (int, float))]
    return sum(numbers) / len(numbers) if len(numbers) == len(found) else None
