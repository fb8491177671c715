"""Hit shares by pool size: infinite cache, offline optimum, best known policy, LRU. No vLLM.

Requests are served one after another in the order they arrive; hits lost because requests run at once are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import msgspec

from kvtune.base.errors import UsageError
from kvtune.data.layout.plan import ModelShape
from kvtune.reading.bounds.loads import LoadFacts, SessionFacts, load_facts
from kvtune.reading.bounds.paths import Paths, node_size, paths_of
from kvtune.reading.bounds.policies import hit_share, infinite, lru, optimum, two_class
from kvtune.requests.types import Workload

DEFAULT_BLOCK = 16
HEAD_STARTS_S = (100.0, 200.0, 300.0, 400.0, inf)
"""Candidates for the two-class policy's head start in seconds, besides 0 s, which is LRU."""

TUNING_SHARE = 0.4
"""Share of the workload, from its start, on which the policy's head start is picked."""

SCHEMA = 1


class TierRung(msgspec.Struct, frozen=True, kw_only=True):
    """A tier `factor` times as large as the pool. Hits of pool and tier together, as shares of all prompt tokens.

    An inclusive tier (vLLM's) stores every prompt as it is computed, and evicts by LRU: pool and tier hold the same
    prefixes until the smaller of them evicts. An exclusive tier stores only what the pool evicts: pool and tier
    together are one LRU of both sizes. Copies take no time here, and a prompt hits what the pool or the tier holds.
    """

    factor: float
    tier_blocks: int
    tier_bytes: int
    inclusive: float
    exclusive: float
    optimum: float


def tier_rungs(
    paths: Paths, prompts: Paths, blocks: int, factors: Sequence[float], block_tokens: int, token_bytes: int
) -> list[TierRung]:
    """Return a rung for each tier size. `prompts`: the requests without their answers, which vLLM does not store."""
    nodes = blocks * block_tokens // paths.node_tokens
    pool = lru(paths, nodes)
    rungs = []
    for factor in factors:
        below = int(nodes * factor)
        both = [max(pair) for pair in zip(pool, lru(prompts, below), strict=True)]
        rungs.append(
            TierRung(
                factor=factor,
                tier_blocks=int(blocks * factor),
                tier_bytes=int(blocks * factor) * block_tokens * token_bytes,
                inclusive=hit_share(both, paths),
                exclusive=hit_share(lru(paths, nodes + below), paths),
                optimum=hit_share(optimum(paths, nodes + below), paths),
            )
        )
    return rungs


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """Results for one pool size. Hit shares are of all prompt tokens. `pool_bytes`: 0 without a model."""

    pool_blocks: int
    pool_tokens: int
    pool_bytes: int
    lru: float
    best_known: float
    optimum: float
    head_start_s: float | None  # of best_known; None: infinite; 0: LRU
    oversized: int = 0  # requests larger than the pool
    tiers: list[TierRung] = []


RUNGS = {
    "infinite": ("infinite cache", "forgets nothing"),
    "optimum": ("offline optimum", "knows the future"),
    "best_known": ("best known policy", "two classes and a ghost list"),
    "lru": ("LRU", "the plain policy"),
}
"""The caches whose bounds are computed, the best first: key -> (name, meaning)."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a workload. `relaxation`: the limits of the model's cache that the bounds ignore, in words, or "".

    `load`: what the workload is.
    """

    schema: int = SCHEMA
    workload: str
    workload_hash: str
    requests: int
    prompt_tokens: int
    distinct_tokens: int  # a pool of this size never has to evict
    block_tokens: int
    node_tokens: int
    model: str = ""
    token_bytes: int = 0
    infinite: float
    load: LoadFacts
    curve: list[Rung]
    relaxation: str = ""
    notes: list[str] = []


def bounds(
    workload: Workload,
    pools: Sequence[int] = (),
    *,
    block_tokens: int = DEFAULT_BLOCK,
    shape: ModelShape | None = None,
    tiers: Sequence[float] = (),
    sessions: SessionFacts | None = None,
    load_notes: Sequence[str] = (),
    done: Callable[[int, int], None] | None = None,
) -> Bounds:
    """Compute the bounds of a workload.

    `pools`: sizes in blocks; empty: the size that holds everything, halved repeatedly. `tiers`: sizes as multiples of
    each pool. `sessions`, `load_notes`: of the load. `done`: called with the number of finished pools and of all pools.
    """
    if block_tokens < 1:
        raise UsageError(f"a block of {block_tokens} tokens", "give a positive --block-size")
    node_tokens = node_size(workload, block_tokens)
    paths = paths_of(workload, node_tokens)
    distinct = node_tokens * sum(
        nodes - sum(piece.high - piece.low for piece in pieces)
        for nodes, pieces in zip(paths.nodes, paths.pieces, strict=True)
    )
    sizes = list(pools) or _sizes(distinct, node_tokens * max((1, *paths.nodes)), block_tokens)
    prompts = paths_of(workload, node_tokens, answers=False) if tiers else paths
    cut = int(len(paths) * TUNING_SHARE)
    early, token_bytes = paths.first(cut), shape.token_bytes if shape is not None else 0
    curve = []
    for number, blocks in enumerate(sizes):
        if blocks * block_tokens < node_tokens:
            raise UsageError(
                f"a pool of {blocks} blocks of {block_tokens} tokens is less than one node of {node_tokens} tokens",
                "give larger --pools",
            )
        behind = tier_rungs(paths, prompts, blocks, tiers, block_tokens, token_bytes) if tiers else []
        curve.append(_rung(paths, early, blocks, block_tokens, token_bytes, behind))
        if done is not None:
            done(number + 1, len(sizes))
    return Bounds(
        workload=workload.spec,
        workload_hash=workload.hash,
        requests=len(paths),
        prompt_tokens=sum(paths.prompt_tokens),
        distinct_tokens=distinct,
        block_tokens=block_tokens,
        node_tokens=node_tokens,
        model=shape.name if shape is not None else "",
        token_bytes=token_bytes,
        infinite=hit_share(infinite(paths), paths),
        load=load_facts(workload, paths, sessions, load_notes),
        curve=curve,
        relaxation=_relaxation(shape),
        notes=_notes(paths, curve, cut),
    )


def _rung(
    paths: Paths, early: Paths, blocks: int, block_tokens: int, token_bytes: int, tiers: list[TierRung]
) -> Rung:
    nodes = blocks * block_tokens // paths.node_tokens
    least = hit_share(lru(paths, nodes), paths)
    head_start_s = _head_start(early, nodes)
    best = least
    if head_start_s:
        best = hit_share(two_class(paths, nodes, head_start_s=head_start_s), paths)
    return Rung(
        pool_blocks=blocks,
        pool_tokens=blocks * block_tokens,
        pool_bytes=blocks * block_tokens * token_bytes,
        lru=least,
        best_known=best,
        optimum=hit_share(optimum(paths, nodes), paths),
        head_start_s=None if head_start_s == inf else head_start_s,
        oversized=sum(n > nodes for n in paths.nodes),
        tiers=tiers,
    )


def _head_start(early: Paths, nodes: int) -> float:
    """Return the head start, in seconds, that hits most on the first part of the workload; 0 is LRU."""
    best_s, share = 0.0, hit_share(lru(early, nodes), early)
    for head_start_s in HEAD_STARTS_S:
        tried = hit_share(two_class(early, nodes, head_start_s=head_start_s), early)
        if tried > share:
            best_s, share = head_start_s, tried
    return best_s


def _sizes(distinct_tokens: int, largest_tokens: int, block_tokens: int) -> list[int]:
    """Return up to six pool sizes: one that holds everything, its half and so on, each at least the largest request."""
    blocks = max(1, -(-max(distinct_tokens, largest_tokens) // block_tokens))
    least = max(1, -(-largest_tokens // block_tokens))
    sizes = [blocks]
    while len(sizes) < 6 and sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sorted(sizes)


def _relaxation(shape: ModelShape | None) -> str:
    if shape is None:
        return ""
    if shape.state_layers:
        return (
            "the whole pool is attention's: states take no memory, prompts can resume at any block boundary"
        )
    if shape.window_layers:
        return "the whole pool is full attention's: windows take no memory, prompts can resume at any block boundary"
    return ""


def _notes(paths: Paths, curve: Sequence[Rung], cut: int) -> list[str]:
    notes = ["requests are served one after another, in the order they arrive"]
    if any(r.head_start_s is None or r.head_start_s > 0 for r in curve):
        notes.append(f"the best policy's head start was picked on the first {cut} of {len(paths)} requests")
    if any(rung.tiers for rung in curve):
        notes.append(
            "an inclusive tier stores prompts as they are computed, as vLLM's does; no copy takes time"
        )
    worst = max((r.oversized for r in curve), default=0)
    if worst:
        notes.append(f"up to {worst} requests are larger than a pool: an engine would refuse them")
    return notes
