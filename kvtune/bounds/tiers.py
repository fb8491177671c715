"""Bounds on the hits of pool and host-memory tier together, for two kinds of tiers. No vLLM.

An inclusive tier (vLLM's) stores every prompt as it is computed, and evicts by LRU: pool and tier hold the same
prefixes until the smaller of them evicts. An exclusive tier stores only what the pool evicts: pool and tier together
are one LRU of both sizes. Copies take no time here, and a prompt hits what the pool or the tier holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtune.bounds.paths import Paths
from kvtune.bounds.policies import hit_share, lru, optimum


class TierRung(msgspec.Struct, frozen=True, kw_only=True):
    """A tier `factor` times as large as the pool. Hits of pool and tier together, as shares of all prompt tokens."""

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
