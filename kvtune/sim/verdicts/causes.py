"""Splits one prompt's tokens into hits and causes of misses, each token exactly once. Pure arithmetic.

A prompt is cut at boundaries, each at or after the one before, so the parts cover the prompt exactly:

    0 ... hit ... target ... alone ... ever ... reachable ... undropped ... whole ... seen ... prompt
     hits  draft    lagging  evicted not_retained   eagle_drop   last_token  partial  cold
           group
"""

from __future__ import annotations

from dataclasses import dataclass

TIER_CAUSES = ("evicted_from_both", "never_stored", "stored_late", "store_refused", "window_not_stored")
"""Causes in engines with a tier of host memory; they replace `lagging_group`, `draft_group` and `evicted`."""

CAUSES = (
    "cold",
    "partial_block",
    "last_token",
    "not_retained",
    "evicted",
    "lagging_group",
    "eagle_drop",
    "draft_group",
    "skipped_lookup",
    *TIER_CAUSES,
)

DIVERGED = "diverged"
"""Part of `cold`, if prompt texts are known: tokens that an earlier prompt has, too, but after a difference."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Token positions in one prompt up to which several caches, each better than the one before, could have hit.

    `hit`: this engine. `alone`: the KV cache group that holds least, looked up by itself. `ever`: this engine with a
    pool that never evicts. `reachable`: also with all windows and states kept. `whole`: also without recomputing the
    last token. `seen`: also matching token by token. `skipped`: the engine did not look up the prompt.

    With speculative decoding, `alone` and `ever` ignore the draft model's own KV cache groups. `target`: this engine if
    it ignored them, too. `undropped`: `reachable` if the drafter used the last matching block. `evicted_for_draft`: the
    evicted block went to the draft model's group.

    With a tier of host memory, `hit` counts tokens from pool and tier, and `tier_cause` says why the tier lacked tokens
    that the pool once held.
    """

    prompt: int
    hit: int
    alone: int
    ever: int
    reachable: int
    whole: int
    seen: int
    skipped: bool = False
    target: int = 0
    undropped: int = 0
    evicted_for_draft: bool = False
    tier_cause: str = ""


def split(at: Boundaries) -> dict[str, int]:
    """Return the missed tokens by cause; with `at.hit` they add up to `at.prompt` exactly."""
    hit = min(at.hit, at.prompt)
    seen = _between(hit, at.seen, at.prompt)
    reachable = _between(hit, at.reachable, seen)
    ever = _between(hit, at.ever, reachable)
    alone = _between(hit, at.alone, ever)
    target = _between(hit, at.target, alone)
    undropped = _between(reachable, at.undropped, seen)
    whole = _between(undropped, at.whole, seen)
    last, partial = whole - undropped, seen - whole
    if seen == at.prompt and partial:
        # The whole prompt was seen before, and its last token is always recomputed.
        last, partial = last + 1, partial - 1
    counts = dict.fromkeys(CAUSES, 0)
    counts["cold"] = at.prompt - seen
    counts["partial_block"] = partial
    counts["last_token"] = last
    counts["eagle_drop"] = undropped - reachable
    if at.skipped:
        counts["skipped_lookup"] = reachable - hit
    elif at.tier_cause:
        counts["not_retained"] = reachable - ever
        counts[at.tier_cause] = ever - hit
    else:
        counts["not_retained"] = reachable - ever
        counts["lagging_group"] = alone - target
        counts["draft_group"] = target - hit
        counts["draft_group" if at.evicted_for_draft else "evicted"] += ever - alone
    return counts


def _between(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)
