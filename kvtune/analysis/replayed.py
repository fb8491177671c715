"""Which settings help, and at what cost, from replays of a run (`header.extra.replayed`). Pure.

Verdict, console, page and `kvtune explain` all use this list. A setting helps if it wins a percentage point of hits or
more, or ends the preemptions; no other setting is advised.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtune.run.extras import Remedy, Replayed
from kvtune.run.types import Run
from kvtune.units import count, percent

WORTH_SHARE = 0.01
"""Share of the prompt tokens. A setting that wins fewer hits is not advised."""

PREEMPTED_SHARE = 0.05
"""With this many preemptions per request or more, the pool is too small."""

CORES = {"kvtune": "kvtune's core", "stock": "stock vLLM"}
OTHER = {"kvtune": "stock", "stock": "kvtune"}


def preempts(preemptions: int, requests: int) -> bool:
    """Whether the pool is too small for the requests in flight."""
    return preemptions >= max(1.0, PREEMPTED_SHARE * requests)


def helping(told: Replayed) -> list[Remedy]:
    """The settings that help, the best first."""
    preempted = preempts(told.preemptions, told.requests)
    return ranked(
        one
        for one in tried(told)
        if wins(one, told)
        or (preempted and keeps(one, told) and not preempts(one.preemptions, told.requests))
    )


def wins(one: Remedy, told: Replayed) -> bool:
    """Whether the setting wins a percentage point of hits or more."""
    return not one.error and 0 < one.gain_tokens >= WORTH_SHARE * told.query_tokens


def keeps(one: Remedy, told: Replayed) -> bool:
    """Whether the setting loses less than a percentage point of hits."""
    return not one.error and one.gain_tokens > -WORTH_SHARE * told.query_tokens


def tried(told: Replayed) -> list[Remedy]:
    return [*([] if told.other is None else [told.other]), *told.remedies]


def ranked(remedies: Iterable[Remedy]) -> list[Remedy]:
    """The settings by hits; of equal ones the first proposed, which is the cheaper, comes first."""
    return sorted(remedies, key=lambda one: -one.gain_tokens)


def brings(one: Remedy, told: Replayed) -> str:
    """`+30.0 points of hits`, or `90 fewer preemptions`."""
    if wins(one, told):
        return f"{points(one.gain_tokens, told.query_tokens)} of hits"
    return f"{count(told.preemptions - one.preemptions)} fewer preemptions"


def points(tokens: int, query_tokens: int) -> str:
    share = 100 * tokens / query_tokens if query_tokens else 0.0
    return f"{share:+.1f} points"


def beside(run: Run) -> str:
    """One sentence: which engine was measured, and how much the other core would have hit."""
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
