"""The table of causes: why prompt tokens miss the prefix cache, each cause declared once.

A cause owns its title, meaning and colour, says whose it is, whether settings can win its tokens, and what helps.
Pages, the terminal, `--json`, replays and advice ask the table. Its order is the order of pages. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Whose = Literal["pool", "tier", "draft", "text", "server", "prompt", "unknown"]
"""What loses the tokens: the pool, host memory, the draft model, the prompt's text, a server's work, the prompt."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why prompt tokens missed.

    replayed: a replay with verdicts can give it.
    winnable: settings, the pool or a better policy can turn its tokens into hits. helps: the kind of change that may.
    colour: of charts, a variable of the page's style; "" takes the next free one.
    """

    key: str
    title: str
    meaning: str
    whose: Whose
    colour: str = ""
    winnable: bool = False
    replayed: bool = False
    helps: str = ""

    @property
    def of_group(self) -> bool:
        """Whether one KV cache group is at fault."""
        return self.winnable and self.replayed


def _kept_no_more(key: str, title: str, meaning: str, whose: Whose, helps: str, colour: str = "") -> Cause:
    """Return a cause of tokens that a KV cache group had and lost, which a replay sees and settings can win."""
    return Cause(key, title, meaning, whose, colour, winnable=True, replayed=True, helps=helps)


DRAFT = "draft_group"
NOT_KEPT = "not_retained"
OTHER_REPLICA = "other_replica"
DIVERGED = "diverged"
"""Part of `cold`, if prompt texts are known: tokens that an earlier prompt has, too, but after a difference."""
UNCLASSIFIED = "unclassified"

CAUSES: dict[str, Cause] = {
    cause.key: cause
    for cause in (
        Cause(
            "not_cached",
            "seen before, not in the cache",
            "computed before: an infinite cache would have it, settings can win it",
            "pool",
            colour="var(--c-gen2)",
            winnable=True,
        ),
        _kept_no_more(
            "evicted",
            "kept, then evicted",
            "cached, then evicted: a larger pool or another order keeps it",
            "pool",
            "eviction",
            "var(--c-gen2)",
        ),
        _kept_no_more(
            NOT_KEPT,
            "seen, but no window or state was kept",
            "seen before, but no window or state was kept at that boundary",
            "pool",
            "retention",
            "var(--c4)",
        ),
        _kept_no_more(
            "lagging_group",
            "cache groups held different parts",
            "the KV cache groups hold different boundaries, and a hit needs the same in all",
            "pool",
            "eviction",
            "var(--c6)",
        ),
        _kept_no_more(
            DRAFT,
            "lost to the draft model's blocks",
            "the draft model's KV cache group lacks it, or took its blocks",
            "draft",
            "eviction",
            "var(--c3)",
        ),
        _kept_no_more(
            "evicted_from_both",
            "evicted from the pool and host memory",
            "stored in host memory, and evicted there and from the pool",
            "tier",
            "tier",
            "var(--c-gen2)",
        ),
        _kept_no_more(
            "never_stored",
            "never stored in host memory",
            "evicted; never offered to host memory (answers), or not admitted there",
            "tier",
            "storing",
        ),
        _kept_no_more(
            "stored_late",
            "evicted, not stored in time",
            "evicted; host memory had no room when it was offered, and it will be offered again",
            "tier",
            "tier",
        ),
        _kept_no_more(
            "store_refused",
            "evicted, no room in host memory",
            "evicted; host memory had no room, and the store was given up",
            "tier",
            "tier",
        ),
        _kept_no_more(
            "window_not_stored",
            "window or state not stored in host memory",
            "evicted; vLLM did not store this window or state: a retention interval keeps more",
            "tier",
            "storing windows",
        ),
        Cause(
            "reset",
            "lost when the cache was reset",
            "cached until the server's cache was reset (/reset_prefix_cache, sleep, new weights): no setting keeps it",
            "server",
        ),
        Cause(
            "other_salt",
            "computed under another salt",
            "an earlier prompt with another cache_salt has these tokens: different salts share no cache",
            "server",
        ),
        Cause(
            "aborted",
            "not computed: aborted",
            "of requests that ended before their prompt was computed: nobody computed these tokens",
            "server",
        ),
        Cause(
            "other_engine",
            "another engine computed it",
            "computed before by another data-parallel engine: a router that follows prefixes sends it there",
            "server",
        ),
        Cause(
            OTHER_REPLICA,
            "another replica computed it",
            "computed before by another server, never by this one: a router that follows prefixes sends it there",
            "server",
        ),
        Cause(
            DIVERGED,
            "after a text that differs",
            "an earlier prompt has these tokens, too, after another text: mend the prompt",
            "text",
        ),
        Cause(
            "eagle_drop",
            "computed again for EAGLE or MTP",
            "the last block that matches: EAGLE and MTP compute it again at each hit",
            "draft",
            colour="var(--c8)",
            replayed=True,
            helps="dropping",
        ),
        Cause(
            "skipped_lookup",
            "no cache lookup",
            "prefix caching was off for the request or the engine",
            "server",
            colour="var(--c7)",
            replayed=True,
            helps="caching",
        ),
        Cause(
            "computed_twice",
            "computed twice at once",
            "two requests computed the same blocks at the same time",
            "server",
        ),
        Cause(
            "tails",
            "no event",
            "less than a whole block, or one block that may be an answer's: the server publishes no cause",
            "unknown",
        ),
        Cause(
            "computing",
            "being computed",
            "of prompts that are being computed: their events are still to come",
            "unknown",
        ),
        Cause(
            "unknown",
            "unknown",
            "kvtune cannot tell: it joined late or lost events, a connector loads blocks, or a request was aborted",
            "unknown",
        ),
        Cause(
            "partial_block",
            "seen, but not a whole block",
            "seen before, but fills only part of a match unit",
            "prompt",
            colour="var(--c2)",
            replayed=True,
            helps="smaller blocks",
        ),
        Cause(
            "last_token",
            "last token, always recomputed",
            "recomputed: the engine needs a token to sample from, and a hit ends before its block",
            "prompt",
            colour="var(--c5)",
            replayed=True,
            helps="smaller blocks",
        ),
        Cause(
            "cold",
            "never seen before",
            "never seen before",
            "prompt",
            colour="var(--c-miss)",
            replayed=True,
        ),
        Cause(
            "replay_differs",
            "unknown: the replay differs",
            "of requests that hit other tokens in the replay, which so cannot tell the cause",
            "unknown",
        ),
        Cause(
            UNCLASSIFIED,
            "cause unknown",
            "the workload was not available, so causes cannot be told apart",
            "unknown",
        ),
    )
}

REPLAYED = tuple(key for key, cause in CAUSES.items() if cause.replayed)
"""Causes that a replay with verdicts gives."""
WINNABLE = tuple(key for key, cause in CAUSES.items() if cause.winnable)
OF_GROUP = tuple(key for key, cause in CAUSES.items() if cause.of_group)
"""Causes for which one KV cache group is at fault."""
OF_TIER = tuple(key for key, cause in CAUSES.items() if cause.whose == "tier")
"""Causes in engines with a tier of host memory, where the pool evicted the tokens."""
UNSEEN = ("cold", DIVERGED)
"""Causes of tokens that no earlier prompt had, after the same tokens."""
UNHEARD = ("unknown", "aborted")
"""Causes of a server's whole blocks of which nobody knows whether they were computed before."""
UNTOLD = (*(key for key, cause in CAUSES.items() if cause.whose == "unknown"), "aborted", "skipped_lookup")
"""Causes that do not tell whether an earlier prompt had the tokens."""


def cause_title(key: str) -> str:
    """Return the title of a cause, or its key if this version does not know the cause."""
    return CAUSES[key].title if key in CAUSES else key.replace("_", " ")


def cause_meaning(key: str) -> str:
    return CAUSES[key].meaning if key in CAUSES else ""


INFINITE = ("not_cached", "last_token", "partial_block", "cold")
"""Causes beside a cache that keeps everything, in the order of a prompt's tokens."""
OF_TEXT = ("other_salt", DIVERGED)
"""Causes that only the texts of a log tell, beside a replay."""
RECOMPUTED = (
    "computed_twice",
    "evicted",
    "reset",
    NOT_KEPT,
    "other_engine",
    OTHER_REPLICA,
    "other_salt",
    "unknown",
    "cold",
    "last_token",
)
"""Causes in the order in which tokens recomputed after a preemption are taken from them: likely causes first."""
COMMON = ("evicted", NOT_KEPT, "unknown", "tails", "computing")
"""Causes that most servers show, in the order of the live view's help."""
PUBLISHED = (*RECOMPUTED, "tails", "aborted")
"""Causes of which a server's account always has a count, be it 0."""
