"""Slow tokens of a comparison: for each side, the mean of its runs by cause. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtune.analysis.stalls.causes import CAUSES


@dataclass(frozen=True, slots=True)
class SideStalls:
    """Means of a side's runs. `causes`: of each cause, the number of gaps that it dominates and its total in ms."""

    limit_ms: float
    slow: float
    excess_ms: float
    causes: dict[str, tuple[float, float]]


def side_stalls(accounts: Sequence[Mapping[str, Any]]) -> SideStalls | None:
    """A side's means from the accounts of its runs, as in `--json`; None where no run has gaps between tokens."""
    known = [account for account in accounts if account["limit_ms"] is not None]
    if not known:
        return None
    nothing = {"gaps": 0, "excess_ms": 0.0}
    sums = {
        cause: tuple(
            sum(account["causes"].get(cause, nothing)[key] for account in known) / len(known)
            for key in ("gaps", "excess_ms")
        )
        for cause in CAUSES
    }
    limit_ms, slow, excess_ms = (
        sum(account[key] for account in known) / len(known) for key in ("limit_ms", "slow", "excess_ms")
    )
    return SideStalls(
        limit_ms, slow, excess_ms, {cause: (gaps, ms) for cause, (gaps, ms) in sums.items() if ms > 0}
    )
