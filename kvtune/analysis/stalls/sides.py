"""Slow tokens of a comparison: for each side, the mean of its runs by cause. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvtune.analysis.stalls.account import CauseShare, Stalls
from kvtune.analysis.stalls.causes import CAUSES


@dataclass(frozen=True, slots=True)
class SideStalls:
    """Means of a side's runs. `causes`: for each cause, the number of gaps that it dominates and its total in ms."""

    limit_ms: float
    slow: float
    excess_ms: float
    causes: dict[str, tuple[float, float]]


def side_stalls(accounts: Sequence[Stalls]) -> SideStalls | None:
    """Return a side's means from the accounts of its runs; None if no run has gaps between tokens."""
    known = [(account, account.limit_ms) for account in accounts if account.limit_ms is not None]
    if not known:
        return None
    nothing = CauseShare(0, 0.0, 0.0)
    causes = {}
    for cause in CAUSES:
        shares = [account.causes.get(cause, nothing) for account, _ in known]
        causes[cause] = (fmean(share.gaps for share in shares), fmean(share.excess_ms for share in shares))
    return SideStalls(
        fmean(limit_ms for _, limit_ms in known),
        fmean(account.slow for account, _ in known),
        fmean(account.excess_ms for account, _ in known),
        {cause: (gaps, ms) for cause, (gaps, ms) in causes.items() if ms > 0},
    )
