"""Finds values of the `two_class` policy's knobs worth a trial, from a workload's reuse distances."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtune.data.knobs import CORE
from kvtune.reading.analysis.comparison.compare import value_at
from kvtune.reading.bounds.paths import node_size, paths_of
from kvtune.requests.types import Workload

SHARES = (0.25, 0.5, 0.9)
"""Shares of the reused tokens. The distance within which each share is reused makes a value to try."""


def reuse_values(workload: Workload, baseline: Mapping[str, object]) -> dict[str, tuple[float, ...]]:
    """Return values of `reuse_bonus_s` and `ghost_factor` for a workload; empty if nothing is reused.

    `baseline`: the summary of a run of this workload, for the run's length and its pool's size.
    """
    block_tokens, blocks, wall_s = (
        value_at(baseline, path) or 0.0 for path in ("engine.block_size", "engine.num_blocks", "wall_s")
    )
    paths = paths_of(workload, node_size(workload, int(block_tokens)))
    pieces = [(request, piece) for request, pieces_of in enumerate(paths.pieces) for piece in pieces_of]
    if not pieces or not wall_s or not blocks:
        return {}
    stored = np.concatenate(([0], np.cumsum(paths.nodes))) * paths.node_tokens
    gaps = np.array([request - piece.last for request, piece in pieces])
    between = np.array([stored[request] - stored[piece.last] for request, piece in pieces])
    weights = np.array([piece.high - piece.low for _, piece in pieces])
    bonuses_s = [float(f"{gap * wall_s / len(paths):.3g}") for gap in _within(gaps, weights)]
    pools = [float(np.ceil(distance / (block_tokens * blocks))) for distance in _within(between, weights)]
    ghost, bonus = CORE["ghost_factor"], CORE["reuse_bonus_s"]
    return {
        "reuse_bonus_s": (*sorted({min(value, bonus.high) for value in bonuses_s}), bonus.high),
        "ghost_factor": tuple(sorted({min(max(1.0, value), ghost.high) for value in pools})),
    }


def _within(distances: np.ndarray, weights: np.ndarray) -> list[float]:
    """Return for each of SHARES the distance within which that share of the tokens is reused."""
    order = np.argsort(distances, kind="stable")
    come = np.cumsum(weights[order]) / weights.sum()
    return [float(distances[order][np.searchsorted(come, share)]) for share in SHARES]
