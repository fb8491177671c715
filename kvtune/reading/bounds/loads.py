"""What a load is: sessions, lengths, pauses, reuse; what each request hits in an infinite cache. No vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.reading.bounds.paths import Paths
from kvtune.requests.loads.prefix_tree import PrefixTree
from kvtune.requests.loads.sessions import Load
from kvtune.requests.loads.tokens import with_answers
from kvtune.requests.types import Request, Span, Workload


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of several values; `total` is their sum. Weighted ones have the weights' sum."""

    mean: float
    p25: float
    p50: float
    p75: float
    p90: float
    p99: float
    most: float
    total: float


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions of a load. `pauses`: seconds, as recorded; `cut_turns`: the share of them that `max_think` cuts.

    `compactions`: prompts that keep less than half of the one before. `joins`: requests that wait for several.
    `reuse_s`: the pause before a prefix comes again, weighted by its tokens.
    """

    sessions: int
    turns: Quantiles
    pauses: Quantiles | None
    max_think: float
    cut_turns: float
    turns_a_minute: float
    subagents: int
    joins: int
    compactions: int
    shared_tokens: int
    left_out_requests: int
    left_out_sessions: int
    reuse_s: Quantiles | None


class LoadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a load. `notes`: what its source does not hold.

    `reuse_tokens`: different tokens that are used between two uses of a prefix, weighted by its tokens: an LRU cache
    of that size hits. Requests are then served in turn, in their order.
    """

    prompt: Quantiles
    output: Quantiles
    reuse_tokens: Quantiles | None = None
    sessions: SessionFacts | None = None
    notes: list[str] = []


def load_facts(
    workload: Workload, paths: Paths, sessions: SessionFacts | None = None, notes: Sequence[str] = ()
) -> LoadFacts:
    """Describe a workload, its requests served in turn. `paths`: of its prompts and answers."""
    distances = list(chain.from_iterable(reuse_distances(paths)))
    weights = [nodes for _, nodes in distances]
    return LoadFacts(
        prompt=_quantiles([request.prompt_tokens for request in workload.requests]),
        output=_quantiles([request.output_tokens for request in workload.requests]),
        reuse_tokens=_quantiles([paths.node_tokens * sum(steps) for steps in distances], weights)
        if distances
        else None,
        sessions=sessions,
        notes=[*([workload.note] if workload.note else []), *notes],
    )


def session_facts(load: Load, block_tokens: int) -> SessionFacts:
    """Describe the sessions of a load, each once."""
    nodes = [node for session in load.sessions for node in session.nodes]
    gaps: list[tuple[float, int]] = []
    heads: set[Span] = set()
    for node in nodes:
        common = node.common
        if node.head and load.rules.share:
            common = sum(span.length for span in node.head if span in heads)
            heads.update(node.head)
        hit = min(common, node.tokens - 1) // block_tokens * block_tokens
        if hit and node.after:
            gaps.append((load.pause(node), hit))
    pauses = [node.think_s for node in nodes if node.after]
    played = sum(sum(turns) for turns in map(load.turn_s, load.sessions))
    main = sum(not node.sub for node in nodes)
    return SessionFacts(
        sessions=len(load.sessions),
        turns=_quantiles([sum(not node.sub for node in session.nodes) for session in load.sessions]),
        pauses=_quantiles(pauses) if pauses else None,
        max_think=load.rules.max_think,
        cut_turns=load.cut_share,
        turns_a_minute=60.0 * main / played,
        subagents=_subagents(load),
        joins=sum(len(node.after) > 1 for node in nodes),
        compactions=_compactions(load),
        shared_tokens=sum(span.length for node in nodes for span in node.head),
        left_out_requests=load.left_out[0],
        left_out_sessions=load.left_out[1],
        reuse_s=_quantiles([gap for gap, _ in gaps], [hit for _, hit in gaps]) if gaps else None,
    )


def possible_hits(requests: Sequence[Request], unit: int) -> list[int]:
    """Return what each request hits in a cache that forgets nothing, to multiples of `unit` tokens, served in turn."""
    tree = PrefixTree()
    hits = []
    for request, answered in zip(requests, with_answers(requests), strict=True):
        hits.append(min(tree.match(request.prompt), request.prompt_tokens - 1) // unit * unit)
        tree.insert(answered.prompt)
    return hits


def reuse_distances(paths: Paths) -> Iterator[list[tuple[int, int]]]:
    """Yield each request's reused nodes as (others, nodes): how many different other nodes were used since.

    An LRU cache of others + nodes hits all of them. `used`: the nodes that each request used last; the others are a sum
    over later requests.
    """
    used = _Sums(len(paths))
    for number, (nodes, pieces) in enumerate(zip(paths.nodes, paths.pieces, strict=True)):
        distances = []
        for piece in pieces:
            hit = min(piece.high, paths.matchable[number]) - piece.low
            if hit > 0:
                distances.append((used.above(piece.last), hit))
        for piece in pieces:
            used.add(piece.last, piece.low - piece.high)
        used.add(number, nodes)
        yield distances


class _Sums:
    """Numbers by place, with sums over all later places in O(log n) (a Fenwick tree)."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self._total = 0

    def add(self, place: int, value: int) -> None:
        self._total += value
        index = place + 1
        while index < len(self._tree):
            self._tree[index] += value
            index += index & -index

    def above(self, place: int) -> int:
        """Return the sum over the places after this one."""
        before, index = 0, place + 1
        while index:
            before += self._tree[index]
            index -= index & -index
        return self._total - before


def _compactions(load: Load) -> int:
    longest = 0
    for session in load.sessions:
        main = [node for node in session.nodes if not node.sub]
        longest += sum(2 * later.common < before.tokens for before, later in pairwise(main))
    return longest


def _subagents(load: Load) -> int:
    return sum(
        node.sub and not any(session.nodes[before].sub for before in node.after)
        for session in load.sessions
        for node in session.nodes
    )


def _quantiles(values: Sequence[float], weights: Sequence[float] = ()) -> Quantiles:
    data = np.asarray(values, dtype=np.float64)
    weight: NDArray[np.float64] = np.asarray(weights or np.ones(len(data)), dtype=np.float64)
    order = np.argsort(data, kind="stable")
    data, weight = data[order], weight[order]
    share = np.cumsum(weight) / weight.sum()
    places = np.searchsorted(share, np.array([0.25, 0.5, 0.75, 0.9, 0.99])).clip(max=len(data) - 1)
    picked: list[float] = data[places].tolist()
    return Quantiles(
        mean=float((data * weight).sum() / weight.sum()),
        p25=picked[0],
        p50=picked[1],
        p75=picked[2],
        p90=picked[3],
        p99=picked[4],
        most=float(data[-1]),
        total=float(weight.sum() if len(weights) else data.sum()),
    )
