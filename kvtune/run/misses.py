"""Why a prompt token misses the prefix cache: each cause's title and meaning, for page, terminal and `explain`."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    title: str
    meaning: str


CAUSES = {
    "cold": Cause("never seen before", "never seen before"),
    "diverged": Cause(
        "after a text that differs",
        "an earlier prompt has these tokens, too, after another text: mend the prompt",
    ),
    "partial_block": Cause("seen, but not a whole block", "seen before, but fills only part of a match unit"),
    "last_token": Cause(
        "last token, always recomputed",
        "recomputed: the engine needs a token to sample from, and a hit ends before its block",
    ),
    "not_cached": Cause(
        "seen before, not in the cache",
        "computed before: an infinite cache would have it, settings can win it",
    ),
    "not_retained": Cause(
        "seen, but no window or state was kept",
        "seen before, but no window or state was kept at that boundary",
    ),
    "evicted": Cause("kept, then evicted", "cached, then evicted: a larger pool or another order keeps it"),
    "other_engine": Cause(
        "another engine computed it",
        "computed before by another data-parallel engine: a router that follows prefixes sends it there",
    ),
    "lagging_group": Cause(
        "cache groups held different parts",
        "the KV cache groups hold different boundaries, and a hit needs the same in all",
    ),
    "eagle_drop": Cause(
        "computed again for EAGLE or MTP",
        "the last block that matches: EAGLE and MTP compute it again at each hit",
    ),
    "draft_group": Cause(
        "lost to the draft model's blocks", "the draft model's KV cache group lacks it, or took its blocks"
    ),
    "skipped_lookup": Cause("no cache lookup", "prefix caching was off for the request or the engine"),
    "evicted_from_both": Cause(
        "evicted from the pool and host memory", "stored in host memory, and evicted there and from the pool"
    ),
    "never_stored": Cause(
        "evicted, never stored in host memory",
        "evicted; never offered to host memory (answers), or not admitted there",
    ),
    "stored_late": Cause(
        "evicted, not stored in time",
        "evicted; host memory had no room when it was offered, and it will be offered again",
    ),
    "store_refused": Cause(
        "evicted, no room in host memory", "evicted; host memory had no room, and the store was given up"
    ),
    "window_not_stored": Cause(
        "evicted, window or state not stored",
        "evicted; vLLM did not store this window or state: a retention interval keeps more",
    ),
    "computed_twice": Cause(
        "computed twice at once", "two requests computed the same blocks at the same time"
    ),
    "tails": Cause(
        "no event",
        "less than a whole block, or one block that may be an answer's: the server publishes no cause",
    ),
    "computing": Cause(
        "being computed", "of prompts that are being computed: their events are still to come"
    ),
    "unknown": Cause(
        "unknown",
        "kvtune joined after the server had begun, or lost events: new, or older than what it knows",
    ),
    "replay_differs": Cause(
        "unknown: the replay differs",
        "of requests that hit other tokens in the replay, which so cannot tell the cause",
    ),
    "unclassified": Cause("cause unknown", "the workload was not available, so causes cannot be told apart"),
}


def cause_title(cause: str) -> str:
    """Return the title of a cause, or its key if this version does not know the cause."""
    return CAUSES[cause].title if cause in CAUSES else cause.replace("_", " ")


def cause_meaning(cause: str) -> str:
    return CAUSES[cause].meaning if cause in CAUSES else ""
