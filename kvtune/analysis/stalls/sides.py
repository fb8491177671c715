"""Slow tokens of runs beside each other: of each side, the mean run by cause. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtune.analysis.stalls.account import stalls
from kvtune.analysis.stalls.causes import CAUSES
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class SideStalls:
    """Means of a side's runs. `causes`: gaps of which it is the largest part, and its milliseconds."""

    limit_ms: float
    slow: float
    excess_ms: float
    causes: dict[str, tuple[float, float]]


def side_stalls(runs: Sequence[Run]) -> SideStalls | None:
    """None where no run has gaps between tokens."""
    found = [account for run in runs if (account := stalls(run)).limit_ms is not None]
    if not found:
        return None
    many = len(found)
    sums = {
        cause: (
            sum(account.causes[cause].gaps for account in found if cause in account.causes) / many,
            sum(account.causes[cause].excess_ms for account in found if cause in account.causes) / many,
        )
        for cause in CAUSES
    }
    return SideStalls(
        sum(account.limit_ms or 0.0 for account in found) / many,
        sum(account.slow for account in found) / many,
        sum(account.excess_ms for account in found) / many,
        {cause: own for cause, own in sums.items() if own[1] > 0},
    )
