"""Says what share of draft tokens a server accepts, and whether it collapsed while hits rose. Pure.

A drafter reads the cache, too: of hits that hold something else it makes tokens that are refused, without an error.
"""

import msgspec

from kvtune.base.units import percent
from kvtune.servers.watch.metrics import ACCEPTED, PROPOSED, Between

LEAST, COLLAPSED = 1_000, 0.25
"""Tokens of which a share is taken; the part of the earlier share below which it is an alarm."""
FEW = f"fewer than {LEAST:,} tokens: no share is said"
SHARES = ((PROPOSED, ACCEPTED), ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits"))


class Drafts(msgspec.Struct, frozen=True):
    """The accepted share now, and from the server's start until then; None of fewer tokens than LEAST."""

    accepted: float | None
    before: float | None
    collapsed: bool
    sentence: str


def drafts(period: Between) -> Drafts | None:
    """Judge a period that ends now; None of a server without a drafter."""
    if period.last.get(PROPOSED) is None:
        return None
    shares: list[float | None] = []
    for get in (period.counted, period.first.get):
        for tokens, *parts in ([get(name) or 0.0 for name in names] for names in SHARES):
            shares.append(min(1.0, sum(parts) / tokens) if tokens >= LEAST else None)
    now, hit, before, hit_before = shares
    collapsed = now is not None and now < COLLAPSED * (before or 0.0) and (hit or 0.0) > (hit_before or 0.0)
    rose = f": collapsed, and hits rose from {percent(hit_before)} to {percent(hit)}" if collapsed else ""
    sentence = f"{percent(now)} accepted, {percent(before)} before the last {period.seconds:.0f} s{rose}"
    return Drafts(now, before, collapsed, FEW if now is before is None else sentence)
