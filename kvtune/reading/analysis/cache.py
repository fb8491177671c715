"""Prompt tokens as hits, or as misses with one cause each; overall and per round. Pure.

The causes compare the hit with an infinite cache, which holds everything computed before the request was sent:

    0 ........ hit ........|.. not_cached ..|. last_token .|. partial_block .|.... cold .... L
                           h             usable        full blocks        seen

cold: never computed before. partial_block: seen before, but after the last full block. last_token: in the last full
block, which cannot be a hit because the prompt's last token must be computed. not_cached: could have been a hit, but
was evicted or never kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtune.data.causes import INFINITE, UNCLASSIFIED
from kvtune.data.run.types import Run, hits_of, queries, untimed
from kvtune.data.tally import Edges, Hits, Tally
from kvtune.reading.analysis.latency import waits_ms
from kvtune.requests.loads.prefix_tree import PrefixTree
from kvtune.requests.types import STREAM_ANSWER, Span, Workload

Counts = NDArray[np.int64]


# Events of the infinite cache; of events at the same time, the lower number comes first.
PROMPT, ANSWER, LOOKUP = 0, 1, 2


class Round(Hits, frozen=True, kw_only=True):
    """`ttft_ms_mean` is None where no request of the round got a token."""

    round: int
    requests: int
    ttft_ms_mean: float | None


def prefix_cache(run: Run, workload: Workload | None) -> Tally:
    """Count hits, and misses by cause. Causes from a replay (`extra.misses`) are used if they add up to the misses.

    Requests with unknown hits are left out.
    """
    requests, server = run.table("requests"), run.header.extra.server
    if server is not None and not len(requests["hit_tokens"]):
        return Tally(server.query_tokens, server.hit_tokens, server.misses or {UNCLASSIFIED: server.missed})
    hits, replayed = hits_of(requests), run.header.extra.misses
    if replayed and min(replayed.values()) >= 0 and sum(replayed.values()) == hits.missed:
        misses = replayed
    elif workload is None or not _same_work(run, workload):
        misses = {UNCLASSIFIED: hits.missed}
    else:
        misses = {name: int(tokens.sum()) for name, tokens in miss_causes(run, workload).items()}
    return Tally(hits.query_tokens, hits.hit_tokens, misses)


def rounds(run: Run) -> list[Round]:
    """Return an entry for each round with a sent request, in order; none for workloads without rounds."""
    requests = run.table("requests")
    sent = np.isfinite(requests["sent_s"])
    ttft = waits_ms(requests)
    by_round = []
    for number in np.unique(requests["round"][sent]).tolist():
        if number < 0:
            continue
        rows = sent & (requests["round"] == number)
        first_ms = ttft[rows & np.isfinite(ttft) & (not untimed(run.header))]
        mean = float(first_ms.mean()) if len(first_ms) else None
        hits = hits_of(requests, rows)
        by_round.append(
            Round(
                hits.query_tokens,
                hits.hit_tokens,
                round=number,
                requests=int(rows.sum()),
                ttft_ms_mean=mean,
            )
        )
    return by_round


def miss_causes(run: Run, workload: Workload) -> dict[str, Counts]:
    """Return the missed tokens of each request by cause, in workload order. Hits and misses add up to the prompt."""
    prompt, hit = queries(run.table("requests"))
    seen = np.minimum(seen_tokens(run, workload), prompt)
    unit = match_unit(run)
    # A hit longer than the estimate (tokens computed between sending and scheduling) shortens these causes.
    rows = [
        Edges(unit, seen_tokens).tally(length, got).misses
        for length, got, seen_tokens in zip(prompt.tolist(), hit.tolist(), seen.tolist(), strict=True)
    ]
    return {name: np.array([row.get(name, 0) for row in rows], dtype=np.int64) for name in INFINITE}


def seen_tokens(run: Run, workload: Workload) -> Counts:
    """Return how many tokens of each prompt an infinite cache held when the request was sent; 0 if it was not sent.

    That cache gets a prompt at the prompt's first output token, and an answer at the answer's end, without the last
    token of the answer, which is not computed.
    """
    requests = run.table("requests")
    sent, first, ended = requests["sent_s"], requests["first_token_s"], requests["finished_s"]
    held = np.where(np.isfinite(first), first, np.where(requests["output_tokens"] > 0, ended, np.nan))
    rows = len(sent)
    times = np.concatenate((held, ended, sent))
    kinds = np.repeat([PROMPT, ANSWER, LOOKUP], rows)
    row = np.tile(np.arange(rows), 3)
    order = np.lexsort((row, kinds, times))  # at equal times, insertions come before lookups
    order = order[np.isfinite(times[order])]
    seen = np.zeros(rows, dtype=np.int64)
    tree = PrefixTree()
    for kind, index in zip(kinds[order].tolist(), row[order].tolist(), strict=True):
        prompt = workload.requests[index].prompt
        if kind == LOOKUP:
            seen[index] = tree.match(prompt)
        elif kind == PROMPT:
            tree.insert(prompt)
        elif (computed := int(requests["output_tokens"][index]) - 1) > 0:
            tree.insert((*prompt, Span(STREAM_ANSWER + index, 0, computed)))
    return seen


def match_unit(run: Run) -> int:
    """Return the number of tokens of which hits are multiples: the recorded hit alignment, else the block size."""
    return max(run.header.engine.hit_unit, 1)


def _same_work(run: Run, workload: Workload) -> bool:
    recorded = run.header.workload.hash
    return len(workload.requests) == len(run.table("requests")["sent_s"]) and recorded in ("", workload.hash)
