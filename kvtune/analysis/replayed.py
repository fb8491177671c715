"""Which settings help, and at what cost, from replays of a run (`header.extra.replayed`). Pure.

Verdict, console, page and `kvtune explain` all use this list. A setting helps if it wins a percentage point of hits or
more, or if it ends preemptions and loses less than a point; no other setting is advised.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtune.run.extras import Remedy, Replayed
from kvtune.run.types import Run
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


def wins(one: Remedy, told: Replayed) -> bool:
    """Whether the setting wins a percentage point of hits or more."""
    return not one.error and 0 < one.gain_tokens >= WORTH_SHARE * told.query_tokens


def keeps(one: Remedy, told: Replayed) -> bool:
    """Whether the setting loses less than a percentage point of hits."""
    return not one.error and one.gain_tokens > -WORTH_SHARE * told.query_tokens


def tried(told: Replayed) -> list[Remedy]:
    return [*([] if told.other is None else [told.other]), *told.remedies]


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
    """Say in a sentence which engine was measured, and what share of tokens the other core hit in a replay."""
    told, core = run.header.extra.replayed, run.header.core
    measured = "kvtune" if core.name == "kvtune" and core.active else "stock"
    what, other = f"Measured: {CORES[measured]}", CORES[OTHER[measured]]
    if told is None:
        return f"{what}."
    if told.other is None or told.other.error:
        why = told.why if told.other is None else told.other.error
        return f"{what}; {other} was not replayed: {why.rstrip('.')}."
    own, others = (percent(hits, told.query_tokens) for hits in (told.hit_tokens, told.other.hit_tokens))
    return f"{what}, {own} of tokens hit. Replayed: {other}, {others}."
