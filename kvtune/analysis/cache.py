"""Where prompt tokens went: hits, or one cause of miss each, overall and per round. Pure.

A prompt token is a miss for the first of these that holds, given what an infinite cache would hold when the
request was sent (everything computed by then):

    0 ........ hit ........|.. not_cached ..|. last_token .|. partial_block .|.... cold .... L
                           h             usable        full blocks        seen

cold: never computed before; partial_block: seen, beyond the last full block; last_token: seen in full blocks,
but the prompt's last token must be recomputed; not_cached: could have been hit (evicted, or never kept).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtune.run.types import Run
from kvtune.workload.prefix_tree import PrefixTree
from kvtune.workload.types import STREAM_ANSWER, Span, Workload

CAUSES = ("cold", "partial_block", "last_token", "not_cached")
Counts = NDArray[np.int64]

UNCLASSIFIED = "unclassified"
"""The only cause where the workload is not at hand (a trace file that is gone)."""


@dataclass(frozen=True, slots=True)
class Round:
    """`ttft_ms_mean` is None where no request of the round got a token."""

    round: int
    requests: int
    hit_tokens: int
    query_tokens: int
    ttft_ms_mean: float | None


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """hit_tokens + all misses = query_tokens, exactly. Requests whose hits nobody told are left out."""

    query_tokens: int = 0
    hit_tokens: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        return self.hit_tokens / self.query_tokens if self.query_tokens else None


def prefix_cache(run: Run, workload: Workload | None) -> PrefixCache:
    """The run's account. Causes that a replay found (`extra.misses`) are used where they add up."""
    prompt, hit = _queries(run)
    query_tokens, hit_tokens = int(prompt.sum()), int(hit.sum())
    missed = query_tokens - hit_tokens
    replayed = run.header.extra.misses
    if replayed and min(replayed.values()) >= 0 and sum(replayed.values()) == missed:
        return PrefixCache(query_tokens, hit_tokens, replayed)
    if workload is None or not _same_work(run, workload):
        return PrefixCache(query_tokens, hit_tokens, {UNCLASSIFIED: missed})
    causes = miss_causes(run, workload)
    return PrefixCache(query_tokens, hit_tokens, {name: int(causes[name].sum()) for name in CAUSES})


def rounds(run: Run) -> list[Round]:
    """One entry for each round that the workload labelled, in order; none for workloads without rounds."""
    requests = run.table("requests")
    prompt, hit = _queries(run)
    ttft = (requests["first_token_s"] - requests["sent_s"]) * 1000.0
    found = []
    for number in np.unique(requests["round"]).tolist():
        if number < 0:
            continue
        own = requests["round"] == number
        waited = ttft[own & np.isfinite(ttft)]
        mean = float(waited.mean()) if len(waited) else None
        found.append(Round(number, int(own.sum()), int(hit[own].sum()), int(prompt[own].sum()), mean))
    return found


def miss_causes(run: Run, workload: Workload) -> dict[str, Counts]:
    """Missed tokens of each request by cause, in workload order: with its hits they add up to its prompt."""
    prompt, hit = _queries(run)
    seen = np.minimum(seen_tokens(run, workload), prompt)
    unit = match_unit(run)
    full = seen // unit * unit
    usable = np.minimum(full, np.maximum(prompt - 1, 0) // unit * unit)
    # Hits beyond the estimate (computed between sending and scheduling) eat up the causes they reach into.
    edges = [np.maximum(edge, hit) for edge in (usable, full, seen, prompt)]
    widths = [right - left for left, right in zip([hit, *edges], edges, strict=False)]
    return dict(zip(("not_cached", "last_token", "partial_block", "cold"), widths, strict=True))


def seen_tokens(run: Run, workload: Workload) -> Counts:
    """How much of each prompt an infinite cache would have held when it was sent; 0 if it was not.

    A prompt counts as held from its first token on, an answer (all but its last token, which is never
    computed) from its end on.
    """
    requests = run.table("requests")
    sent, first, ended = requests["sent_s"], requests["first_token_s"], requests["finished_s"]
    held = np.where(np.isfinite(first), first, np.where(requests["output_tokens"] > 0, ended, np.nan))
    rows = len(sent)
    times = np.concatenate((held, ended, sent))
    what = np.repeat([0, 1, 2], rows)
    row = np.tile(np.arange(rows), 3)
    order = np.lexsort((row, what, times))  # at one time: first what is held, then who asks
    order = order[np.isfinite(times[order])]
    seen = np.zeros(rows, dtype=np.int64)
    tree = PrefixTree()
    for kind, index in zip(what[order].tolist(), row[order].tolist(), strict=True):
        prompt = workload.requests[index].prompt
        if kind == 2:
            seen[index] = tree.match(prompt)
        elif kind == 0:
            tree.insert(prompt)
        elif (computed := int(requests["output_tokens"][index]) - 1) > 0:
            tree.insert((*prompt, Span(STREAM_ANSWER + index, 0, computed)))
    return seen


def match_unit(run: Run) -> int:
    """Tokens in which hits are counted: the engine's own figure where it told one, else its block size."""
    unit = run.header.engine.settings.get("hit_alignment_tokens")
    if isinstance(unit, int) and unit > 0:
        return unit
    return max(run.header.engine.block_size, 1)


def _queries(run: Run) -> tuple[Counts, Counts]:
    """Prompt and hit tokens of each request; both 0 where the engine did not tell its hits."""
    requests = run.table("requests")
    told = requests["hit_tokens"] >= 0
    prompt = np.where(told, requests["prompt_tokens"], 0).astype(np.int64)
    return prompt, np.where(told, np.minimum(requests["hit_tokens"], prompt), 0).astype(np.int64)


def _same_work(run: Run, workload: Workload) -> bool:
    told = run.header.workload.hash
    return len(workload.requests) == len(run.table("requests")["sent_s"]) and told in ("", workload.hash)
