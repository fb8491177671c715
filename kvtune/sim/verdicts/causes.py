"""Where the tokens of one prompt went: hit, or exactly one cause of miss. Pure arithmetic on boundaries.

A prompt is cut at boundaries that can only grow from left to right, so the parts cover it exactly:

    0 ... hit ... alone ... ever ... reachable ... whole ... seen ... prompt
     hits  lagging  evicted not_retained  last_token  partial  cold
"""

from __future__ import annotations

from dataclasses import dataclass

CAUSES = (
    "cold",
    "partial_block",
    "last_token",
    "not_retained",
    "evicted",
    "lagging_group",
    "skipped_lookup",
)

MEANING = {
    "cold": "never seen before",
    "partial_block": "seen, but the last match unit is not full",
    "last_token": "recomputed to have something to sample from",
    "not_retained": "seen, but no window or state was kept at that boundary",
    "evicted": "kept, then evicted",
    "lagging_group": "every group holds something, but not at the same boundary",
    "skipped_lookup": "the cache was not asked",
}


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Token positions in one prompt, each the end of what some engine could have hit.

    `hit`: this engine. `alone`: the group that holds least, asked alone. `ever`: this engine with a pool that
    never evicts. `reachable`: an engine that also keeps every window and state. `whole`: one that also needs
    no token to recompute. `seen`: one that matches token by token. `skipped`: the cache was not asked at all.
    """

    prompt: int
    hit: int
    alone: int
    ever: int
    reachable: int
    whole: int
    seen: int
    skipped: bool = False


def split(at: Boundaries) -> dict[str, int]:
    """Missed tokens by cause; with `at.hit` they add up to `at.prompt` exactly, and none is negative."""
    hit = min(at.hit, at.prompt)
    seen = _between(hit, at.seen, at.prompt)
    reachable = _between(hit, at.reachable, seen)
    ever = _between(hit, at.ever, reachable)
    alone = _between(hit, at.alone, ever)
    whole = _between(reachable, at.whole, seen)
    last, partial = whole - reachable, seen - whole
    if seen == at.prompt and partial:
        # All of it was seen before, yet its last token is always computed again.
        last, partial = last + 1, partial - 1
    counts = dict.fromkeys(CAUSES, 0)
    counts["cold"] = at.prompt - seen
    counts["partial_block"] = partial
    counts["last_token"] = last
    if at.skipped:
        counts["skipped_lookup"] = reachable - hit
    else:
        counts["not_retained"] = reachable - ever
        counts["evicted"] = ever - alone
        counts["lagging_group"] = alone - hit
    return counts


def _between(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)
