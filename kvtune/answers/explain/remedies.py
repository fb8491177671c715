"""Which changes may turn a run's misses into hits: a filter of the table of changes. `explain` replays them.

What a change may win is arithmetic: the tokens of the causes that it is for, times the share of them that it can turn
into hits. Those first that may win most; for a run of stock vLLM, those that need no kvtune. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvtune.answers.changes import (
    PREEMPTED,
    SIZES,
    Change,
    Situation,
    changed_flags,
    changes,
    has_states,
    larger_pool,
)
from kvtune.data.causes import CAUSES
from kvtune.data.run.types import EngineInfo
from kvtune.reading.analysis.replayed import WORTH_SHARE

INCLUDES: dict[str, dict[str, float]] = {
    "tier": {"eviction": 1.0},
    "storing": {"eviction": 1.0},
    "storing windows": {"tier": 0.5, "eviction": 0.5},
    "dropping": {"smaller blocks": 1.0},
}
"""Other kinds of change that may win a kind of cause, each with its share of what the cause's own kind wins."""


def candidates(
    misses: dict[str, int], query_tokens: int, here: Situation, *, preempted: bool = False
) -> list[Change]:
    """Return changes without repeats, those first that may win most tokens.

    `preempted`: the pool is too small for the requests in flight. Changes against that come before all others. To stock
    vLLM, changes that need kvtune's core come last.
    """
    table = [change for change in changes(here) if not change.why_not]
    winners: dict[str, Change] = {}
    for cause in CAUSES.values():
        tokens = misses.get(cause.key, 0)
        if not cause.helps or tokens < WORTH_SHARE * query_tokens:
            continue
        for change, share in _winning(table, cause.helps):
            may_win = share * tokens
            before = winners.get(change.change, replace(change, cause=cause.key, place=len(winners)))
            # For both causes: it is named for the one in which it may win more.
            larger = cause.key if may_win > before.may_win else before.cause
            winners[change.change] = replace(before, cause=larger, may_win=before.may_win + may_win)
    stock = here.setup.core == "stock"
    ranked = sorted(winners.values(), key=lambda each: (stock and each.setup.core == "kvtune", -each.may_win))
    against = [change for change in table if preempted and PREEMPTED in change.wins]
    first = [
        replace(change, cause=PREEMPTED) for change in sorted(against, key=lambda each: -each.wins[PREEMPTED])
    ]
    named = {change.change for change in first}
    return [*first, *(change for change in ranked if change.change not in named)]


def _winning(table: Sequence[Change], helps: str) -> Iterator[tuple[Change, float]]:
    """Yield the changes for a kind of cause, and the share of its tokens that each may win."""
    for kind, part in {helps: 1.0, **INCLUDES.get(helps, {})}.items():
        yield from ((change, part * change.wins[kind]) for change in table if kind in change.wins)


def combined(options: Sequence[Change], here: Situation) -> list[Change]:
    """Return the first two changes, each together with twice the pool, for runs that no single change helps."""
    twice = larger_pool(here, 2.0)
    # Not those that size the pool themselves.
    keep = [
        each
        for each in options
        if not twice.why_not and not {*SIZES} & changed_flags(each, here.setup).keys()
    ]
    return [
        replace(
            each,
            change=f"{each.change}, and {twice.change}",
            setup=each.setup.with_flags(num_gpu_blocks_override=2 * here.blocks),
            cost=", ".join(filter(None, (each.cost, twice.cost))),
        )
        for each in keep[:2]
    ]


def floor_of(engine: EngineInfo, packed: bool) -> str:
    """Return, in words, the shortest shared prefix that can hit in a model with states, and why; else ""."""
    if not has_states(engine):
        return ""
    tokens = max(int(group.get("block_size", 0)) for group in engine.groups)
    holds = (
        "its pages in all attention layers together hold states (core.packed)"
        if packed
        else "its page in one attention layer must hold one state (core.packed makes blocks smaller, where supported)"
    )
    return f"a block is {tokens:,} tokens, and no shorter prefix can hit: {holds}"
