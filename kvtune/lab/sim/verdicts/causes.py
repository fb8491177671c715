"""Splits one prompt's tokens into hits and causes of misses, each token exactly once. Pure arithmetic.

A prompt is cut at boundaries, each at or after the one before, so the parts cover the prompt exactly:

    0 ... hit ... target ... alone ... ever ... reachable ... undropped ... whole ... seen ... prompt
     hits  draft    lagging  evicted not_retained   eagle_drop   last_token  partial  cold
           group
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from kvtune.data import tally
from kvtune.data.causes import DRAFT, REPLAYED
from kvtune.data.tally import Edges, Tally


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


def split(boundaries: Boundaries, text: Edges | None = None) -> Tally:
    """Return the prompt's tokens; each cause that a replay gives has a count.

    `text`: what earlier prompts had of it; then causes of what was never seen are told apart.
    """
    if boundaries.skipped:
        edges = [("skipped_lookup", boundaries.reachable)]
    elif boundaries.tier_cause:
        edges = [(boundaries.tier_cause, boundaries.ever), ("not_retained", boundaries.reachable)]
    else:
        lost = DRAFT if boundaries.evicted_for_draft else "evicted"
        edges = [
            (DRAFT, boundaries.target),
            ("lagging_group", boundaries.alone),
            (lost, boundaries.ever),
            ("not_retained", boundaries.reachable),
        ]
    undropped = max(boundaries.reachable, boundaries.undropped)
    edges += [
        ("eagle_drop", undropped),
        ("last_token", max(undropped, boundaries.whole)),
        ("partial_block", boundaries.seen),
    ]
    if text is not None:
        more = replace(text, seen=boundaries.seen).unseen(boundaries.hit)
        upto = list(accumulate((edge for _, edge in more), max, initial=boundaries.seen))
        edges += [(cause, edge) for (cause, _), edge in zip(more, upto[1:], strict=True)]
    made = Tally.sum([tally.split(boundaries.prompt, boundaries.hit, edges)], REPLAYED)
    if not made.misses["cold"] and made.misses["partial_block"]:
        # The whole prompt was seen before, and its last token is always recomputed.
        made.misses["last_token"] += 1
        made.misses["partial_block"] -= 1
    return made
