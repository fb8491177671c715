"""The mean summary of repeated runs: numbers are averaged, everything else is the first run's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def average(summaries: Sequence[Any]) -> Any:
    """Return the mean of each number in summaries of the same shape; None where one summary has no number."""
    first = summaries[0]
    if isinstance(first, Mapping):
        return {key: average([s[key] for s in summaries if key in s]) for key in first}
    if isinstance(first, list):
        fewest = min(len(s) for s in summaries)
        return [average([s[i] for s in summaries]) for i in range(fewest)]
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        return first
    numbers = [s for s in summaries if isinstance(s, (int, float))]
    return sum(numbers) / len(numbers) if len(numbers) == len(summaries) else None
