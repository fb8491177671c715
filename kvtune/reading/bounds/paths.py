"""A workload as paths in a prefix tree, cut into pieces by the request that used each part last. No vLLM.

A node is `node_tokens` tokens after a certain prefix. A piece is a range of a path's nodes with one last user: if
request 1 used nodes 0-9 and then request 2 nodes 0-4, the path 0-9 of request 3 has the pieces 0-4 and 5-9. Caches
keep and evict along pieces, so bounds work on pieces instead of nodes, which is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtune.requests.loads.tokens import hash_arrays, with_answers
from kvtune.requests.loads.trace_rows import MOONCAKE_BLOCK
from kvtune.requests.types import Request, Workload

Ints = NDArray[np.int64]


class Piece(NamedTuple):
    """Nodes [low, high) of a path were last used by request `last`."""

    last: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Paths:
    """Requests in the order they are served, one after another.

    nodes: number in prompt and answer. matchable: nodes of the prompt that can hit (its last token is always computed).
    pieces: those that an earlier request used, the prompt's start first. prompt_tokens: the base of hit shares.
    """

    node_tokens: int
    arrival_s: Sequence[float]
    nodes: Sequence[int]
    matchable: Sequence[int]
    prompt_tokens: Sequence[int]
    pieces: Sequence[Sequence[Piece]]

    def __len__(self) -> int:
        return len(self.nodes)

    def first(self, count: int) -> Paths:
        return Paths(
            self.node_tokens,
            self.arrival_s[:count],
            self.nodes[:count],
            self.matchable[:count],
            self.prompt_tokens[:count],
            self.pieces[:count],
        )


def paths_of(workload: Workload, node_tokens: int, answers: bool = True) -> Paths:
    """Return the paths of a workload. `answers`: generated tokens are cached, too, for the next turn of a chat."""
    planned = workload.requests
    order = _order(planned)
    served: list[Request] = list(with_answers(planned)) if answers else list(planned)
    served = [served[i] for i in order]
    hashes = list(hash_arrays(served, node_tokens))
    lengths = np.fromiter((len(h) for h in hashes), np.int64, len(hashes))
    last = _last_users(np.concatenate(hashes) if hashes else np.empty(0, np.uint64), lengths)
    prompts = [planned[i].prompt_tokens for i in order]
    return Paths(
        node_tokens,
        _arrivals(planned, order),
        lengths.tolist(),
        [max(0, tokens - 1) // node_tokens for tokens in prompts],
        prompts,
        _pieces(last, lengths),
    )


def node_size(workload: Workload, block_tokens: int) -> int:
    """Return a node's number of tokens: one block, but 512 in a trace, which identifies prefixes by 512 tokens."""
    is_trace = any(r.kind == "trace" for r in workload.requests[:1])
    return MOONCAKE_BLOCK if is_trace and MOONCAKE_BLOCK % block_tokens == 0 else block_tokens


def _order(requests: Sequence[Request]) -> list[int]:
    """Return request numbers sorted by arrival, then number. A turn comes after the turn that it waits for."""
    sent: list[tuple[float, int]] = []
    for index, request in enumerate(requests):
        ready = request.arrival_s or 0.0
        if request.after:
            ready = max(ready, max(sent[before][0] for before in request.after) + request.think_s)
        sent.append((ready, index))
    return sorted(range(len(requests)), key=sent.__getitem__)


def _arrivals(requests: Sequence[Request], order: Sequence[int]) -> list[float]:
    """Return arrival times in seconds; in a workload without arrivals, one request per second."""
    if any(r.arrival_s is not None for r in requests):
        times = np.maximum.accumulate([requests[i].arrival_s or 0.0 for i in order])
        return [float(t) for t in times]
    return [float(i) for i in range(len(order))]


def _last_users(hashes: NDArray[np.uint64], lengths: Ints) -> Ints:
    """Return the previous request that used each node, or -1, for the nodes of all paths one after another."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    order = np.argsort(hashes, kind="stable")
    sorted_hashes, sorted_owner = hashes[order], owner[order]
    last = np.full(len(hashes), -1, dtype=np.int64)
    same = sorted_hashes[1:] == sorted_hashes[:-1]
    last[order[1:][same]] = sorted_owner[:-1][same]
    return last


def _pieces(last: Ints, lengths: Ints) -> list[list[Piece]]:
    ends = np.cumsum(lengths)
    starts = ends - lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    cut = (
        np.flatnonzero(np.diff(last, prepend=-2) | np.diff(owner, prepend=-1))
        if len(last)
        else np.empty(0, int)
    )
    pieces: list[list[Piece]] = [[] for _ in range(len(lengths))]
    stops = np.append(cut, len(last))[1:]
    for start, stop, user, request in zip(
        cut.tolist(), stops.tolist(), last[cut].tolist(), owner[cut].tolist(), strict=True
    ):
        if user >= 0:
            base = int(starts[request])
            pieces[request].append(Piece(user, start - base, stop - base))
    return pieces
