"""Which settings help, and at what cost, from replays of a run (`header.extra.replayed`). Pure.

Verdict, console, page and `kvtune explain` all use this list. A setting helps if it wins a percentage point of hits or
more, and more than the gap between run and replay, or if it ends preemptions and loses less than that; no other setting
is advised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvtune.run.extras import Remedy, Replayed, TextAccount
from kvtune.run.types import Run, hits_of
from kvtune.units import count, percent

WORTH_SHARE = 0.01
"""The least share of the prompt tokens that a setting must win as hits to be advised."""

PREEMPTED_SHARE = 0.05
"""From this many preemptions per request on, the pool is too small."""

CORES = {"kvtune": "kvtune's core", "stock": "stock vLLM"}
OTHER = {"kvtune": "stock", "stock": "kvtune"}


def preempts(preemptions: int, requests: int) -> bool:
    """Whether the pool is too small for the requests in flight."""
    return preemptions >= max(1.0, PREEMPTED_SHARE * requests)


def helping(told: Replayed) -> list[Remedy]:
    """Return the settings that help, the best first; for a run of stock vLLM first those that need no kvtune."""
    preempted = preempts(told.preemptions, told.requests)
    best = ranked(
        one
        for one in tried(told)
        if wins(one, told)
        or (preempted and keeps(one, told) and not preempts(one.preemptions, told.requests))
    )
    stock = told.other is not None and told.other.core == "kvtune"
    return sorted(best, key=lambda one: stock and not flags_only(one))


FLAGS_ONLY, CORE_TOO = "vLLM flags only", "needs kvtune's core"


def flags_only(one: Remedy) -> bool:
    """Whether stock vLLM can be served with the setting."""
    return one.core == "stock"


def needs(one: Remedy) -> str:
    """Say what serves the setting."""
    return FLAGS_ONLY if flags_only(one) else CORE_TOO


def more_tries(told: Replayed) -> str:
    """Say how many settings were left out, and how to try them; "" if none was."""
    if not told.untried:
        return ""
    more = len(told.remedies) + told.untried
    return f"{count(told.untried)} more may help and were not tried (--tries {more})"


def worth(told: Replayed) -> float:
    """Return the tokens that a setting must win as hits to be advised: a point, or the gap between run and replay."""
    return max(WORTH_SHARE * told.query_tokens, abs(told.gap_tokens))


def wins(one: Remedy, told: Replayed) -> bool:
    """Whether the setting wins enough hits to be advised."""
    return not one.error and 0 < one.gain_tokens >= worth(told)


def keeps(one: Remedy, told: Replayed) -> bool:
    """Whether the setting loses less than a gain must be."""
    return not one.error and one.gain_tokens > -worth(told)


def within_gap(told: Replayed) -> list[Remedy]:
    """Return the settings that win a point or more, but less than the gap between run and replay."""
    least = WORTH_SHARE * told.query_tokens
    return [
        one for one in tried(told) if not one.error and not wins(one, told) and 0 < one.gain_tokens >= least
    ]


def tried(told: Replayed) -> list[Remedy]:
    return [*([] if told.other is None else [told.other]), *told.remedies]


class Mend(NamedTuple):
    """A replay with prompts mended. `what`: the text that differs, in words; `how`: what to change in the client."""

    what: str
    how: str
    hit_tokens: int
    gain_tokens: int


def mends(texts: TextAccount | None, told: Replayed) -> list[Mend]:
    """Return what mending the prompts' text wins: each difference alone, with all before it, and all of them.

    Only those that help are returned, the best first; all of them only if that brings more than a part.
    """
    if texts is None or not texts.query_tokens or not texts.engine:
        return []
    found = [
        Mend(one.title, one.mend, one.hit_tokens, one.hit_tokens - texts.hit_tokens)
        for one in texts.groups
        if one.query_tokens == texts.query_tokens
    ]
    found += [
        Mend(
            f"{one.title}, and all before it",
            "Mend each as below.",
            one.with_before_hit_tokens,
            one.with_before_hit_tokens - texts.hit_tokens,
        )
        for one in texts.groups
        if one.query_tokens == texts.query_tokens and one.with_before_hit_tokens > one.hit_tokens
    ]
    best = max((one.hit_tokens for one in found), default=0)
    if (
        len(texts.groups) > 1
        and texts.mended_hit_tokens > best
        and texts.mended_query_tokens == texts.query_tokens
    ):
        gain = texts.mended_hit_tokens - texts.hit_tokens
        what = f"all {len(texts.groups)} texts that differ"
        found.append(Mend(what, "Mend each as below.", texts.mended_hit_tokens, gain))
    return sorted(
        (one for one in found if 0 < one.gain_tokens >= worth(told)), key=lambda one: -one.gain_tokens
    )


def ranked(remedies: Iterable[Remedy]) -> list[Remedy]:
    """Sort the settings by hits, most first. Equal ones stay in the order proposed, which is cheapest first."""
    return sorted(remedies, key=lambda one: -one.gain_tokens)


def brings(one: Remedy, told: Replayed) -> str:
    """Describe the gain: `+30.0 points of hits`, or `90 fewer preemptions`."""
    if wins(one, told):
        return f"{points(one.gain_tokens, told.query_tokens)} of hits"
    return f"{count(told.preemptions - one.preemptions)} fewer preemptions"


def points(tokens: int, query_tokens: int) -> str:
    share = 100 * tokens / query_tokens if query_tokens else 0.0
    return f"{share:+.1f} points"


def beside(run: Run) -> str:
    """Say in a sentence which engine was measured or replayed, and what share of tokens the other core hit."""
    told, core = run.header.extra.replayed, run.header.core
    measured = "kvtune" if core.name == "kvtune" and core.active else "stock"
    replayed = run.header.source == "sim"
    what, other = f"{'Replayed' if replayed else 'Measured'}: {CORES[measured]}", CORES[OTHER[measured]]
    if told is None or told.other is None or told.other.error:
        server, rate = run.header.extra.server, hits_of(run.table("requests")).rate
        if rate is None and server is not None:
            rate = server.rate
        what += f", {percent(rate)} of tokens hit" if rate is not None else ""
        why = "" if told is None else told.why if told.other is None else told.other.error
        return f"{what}; {other} was not replayed: {why.rstrip('.')}." if told is not None else f"{what}."
    own, others = (percent(hits, told.query_tokens) for hits in (told.hit_tokens, told.other.hit_tokens))
    return f"{what}, {own} of tokens hit{'; ' if replayed else '. Replayed: '}{other}, {others}."
