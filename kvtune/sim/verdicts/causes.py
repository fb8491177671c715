"""Splits one prompt's tokens into hits and causes of misses, each token exactly once. Pure arithmetic.

A prompt is cut at boundaries, each at or after the one before, so the parts cover the prompt exactly:

    0 ... hit ... target ... alone ... ever ... reachable ... undropped ... whole ... seen ... prompt
     hits  draft    lagging  evicted not_retained   eagle_drop   last_token  partial  cold
           group
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from kvtune import tally
from kvtune.causes import DRAFT, REPLAYED
from kvtune.tally import Edges, Tally


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


def split(at: Boundaries, text: Edges | None = None) -> Tally:
    """Return the prompt's tokens; each cause that a replay gives has a count.

    `text`: what earlier prompts had of it; then causes of what was never seen are told apart.
    """
    if at.skipped:
        edges = [("skipped_lookup", at.reachable)]
    elif at.tier_cause:
        edges = [(at.tier_cause, at.ever), ("not_retained", at.reachable)]
    else:
        lost = DRAFT if at.evicted_for_draft else "evicted"
        edges = [
            (DRAFT, at.target),
            ("lagging_group", at.alone),
            (lost, at.ever),
            ("not_retained", at.reachable),
        ]
    undropped = max(at.reachable, at.undropped)
    edges += [("eagle_drop", undropped), ("last_token", max(undropped, at.whole)), ("partial_block", at.seen)]
    if text is not None:
        more = replace(text, seen=at.seen).unseen(at.hit)
        upto = list(accumulate((edge for _, edge in more), max, initial=at.seen))
        edges += [(cause, edge) for (cause, _), edge in zip(more, upto[1:], strict=True)]
    made = Tally.sum([tally.split(at.prompt, at.hit, edges)], REPLAYED)
    if not made.misses["cold"] and made.misses["partial_block"]:
        # The whole prompt was seen before, and its last token is always recomputed.
        made.misses["last_token"] += 1
        made.misses["partial_block"] -= 1
    return made
