"""Which settings help, and at what cost, from replays of a run (`header.extra.replayed`). Pure.

Verdict, console, page and `kvtune explain` all use this list. A setting helps if it wins a percentage point of hits or
more, and more than the gap between run and replay, or if it ends preemptions and loses less than that; no other setting
is advised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvtune.base.units import count, percent
from kvtune.data.run.extras import Remedy, Replayed, TextAccount
from kvtune.data.run.types import Run, hits_of

WORTH_SHARE = 0.01
"""The least share of the prompt tokens that a setting must win as hits to be advised."""

PREEMPTED_SHARE = 0.05
"""From this many preemptions per request on, the pool is too small."""

CORES = {"kvtune": "kvtune's core", "stock": "stock vLLM"}
OTHER = {"kvtune": "stock", "stock": "kvtune"}


def preempts(preemptions: int, requests: int) -> bool:
    """Whether the pool is too small for the requests in flight."""
    return preemptions >= max(1.0, PREEMPTED_SHARE * requests)


def helping(replayed: Replayed) -> list[Remedy]:
    """Return the settings that help, the best first; for a run of stock vLLM first those that need no kvtune."""
    preempted = preempts(replayed.preemptions, replayed.requests)
    best = ranked(
        remedy
        for remedy in tried(replayed)
        if wins(remedy, replayed)
        or (preempted and keeps(remedy, replayed) and not preempts(remedy.preemptions, replayed.requests))
    )
    stock = replayed.other is not None and replayed.other.core == "kvtune"
    return sorted(best, key=lambda remedy: stock and not flags_only(remedy))


FLAGS_ONLY, CORE_TOO = "vLLM flags only", "needs kvtune's core"


def flags_only(remedy: Remedy) -> bool:
    """Whether stock vLLM can be served with the setting."""
    return remedy.core == "stock"


def needs(remedy: Remedy) -> str:
    """Say what serves the setting."""
    return FLAGS_ONLY if flags_only(remedy) else CORE_TOO


def more_tries(replayed: Replayed) -> str:
    """Say how many settings were left out, and how to try them; "" if none was."""
    if not replayed.untried:
        return ""
    more = len(replayed.remedies) + replayed.untried
    return f"{count(replayed.untried)} more may help and were not tried (--tries {more})"


def worth(replayed: Replayed) -> float:
    """Return the tokens that a setting must win as hits to be advised: a point, or the gap between run and replay."""
    return max(WORTH_SHARE * replayed.query_tokens, abs(replayed.gap_tokens))


def wins(remedy: Remedy, replayed: Replayed) -> bool:
    """Whether the setting wins enough hits to be advised."""
    return not remedy.error and 0 < remedy.gain_tokens >= worth(replayed)


def keeps(remedy: Remedy, replayed: Replayed) -> bool:
    """Whether the setting loses less than a gain must be."""
    return not remedy.error and remedy.gain_tokens > -worth(replayed)


def within_gap(replayed: Replayed) -> list[Remedy]:
    """Return the settings that win a point or more, but less than the gap between run and replay."""
    least = WORTH_SHARE * replayed.query_tokens
    return [
        remedy
        for remedy in tried(replayed)
        if not remedy.error and not wins(remedy, replayed) and 0 < remedy.gain_tokens >= least
    ]


def tried(replayed: Replayed) -> list[Remedy]:
    return [*([] if replayed.other is None else [replayed.other]), *replayed.remedies]


class Mend(NamedTuple):
    """A replay with prompts mended. `what`: the text that differs, in words; `how`: what to change in the client."""

    what: str
    how: str
    hit_tokens: int
    gain_tokens: int


def mends(texts: TextAccount | None, replayed: Replayed) -> list[Mend]:
    """Return what mending the prompts' text wins: each difference alone, with all before it, and all of them.

    Only those that help are returned, the best first; all of them only if that brings more than a part.
    """
    if texts is None or not texts.query_tokens or not texts.engine:
        return []
    each = "Mend each as below."
    groups = [group for group in texts.groups if group.query_tokens == texts.query_tokens]
    hits = [(group.title, group.mend, group.hit_tokens) for group in groups]
    hits += [
        (f"{group.title}, and all before it", each, group.with_before_hit_tokens)
        for group in groups
        if group.with_before_hit_tokens > group.hit_tokens
    ]
    best = max((tokens for _, _, tokens in hits), default=0)
    whole = len(texts.groups) > 1 and texts.mended_query_tokens == texts.query_tokens
    if whole and texts.mended_hit_tokens > best:
        hits.append((f"all {len(texts.groups)} texts that differ", each, texts.mended_hit_tokens))
    mends_ = [Mend(what, change, tokens, tokens - texts.hit_tokens) for what, change, tokens in hits]
    worthy = (mend for mend in mends_ if 0 < mend.gain_tokens >= worth(replayed))
    return sorted(worthy, key=lambda mend: -mend.gain_tokens)


def ranked(remedies: Iterable[Remedy]) -> list[Remedy]:
    """Sort the settings by hits, most first. Equal ones stay in the order proposed, which is cheapest first."""
    return sorted(remedies, key=lambda remedy: -remedy.gain_tokens)


def brings(remedy: Remedy, replayed: Replayed) -> str:
    """Describe the gain: `+30.0 points of hits`, or `90 fewer preemptions`."""
    if wins(remedy, replayed):
        return f"{points(remedy.gain_tokens, replayed.query_tokens)} of hits"
    return f"{count(replayed.preemptions - remedy.preemptions)} fewer preemptions"


def points(tokens: int, query_tokens: int) -> str:
    share = 100 * tokens / query_tokens if query_tokens else 0.0
    return f"{share:+.1f} points"


def beside(run: Run) -> str:
    """Say in a sentence which engine was measured or replayed, and what share of tokens the other core hit."""
    made, core = run.header.extra.replayed, run.header.core
    measured = "kvtune" if core.name == "kvtune" and core.active else "stock"
    replayed = run.header.source == "sim"
    what, other = f"{'Replayed' if replayed else 'Measured'}: {CORES[measured]}", CORES[OTHER[measured]]
    if made is None or made.other is None or made.other.error:
        server, rate = run.header.extra.server, hits_of(run.table("requests")).rate
        if rate is None and server is not None:
            rate = server.rate
        what += f", {percent(rate)} of tokens hit" if rate is not None else ""
        if made is None:
            return f"{what}."
        why = made.why if made.other is None else made.other.error
        return f"{what}; {other} was not replayed: {why.rstrip('.')}."
    own, others = (percent(hits, made.query_tokens) for hits in (made.hit_tokens, made.other.hit_tokens))
    return f"{what}, {own} of tokens hit{'; ' if replayed else '. Replayed: '}{other}, {others}."
