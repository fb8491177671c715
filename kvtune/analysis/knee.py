"""Where a curve of gain over cost bends: the size beyond which more of it pays less. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FEWEST = 3


def knee(curve: Sequence[tuple[float, float]]) -> float | None:
    """The cost of the point that lies furthest above the line from the first point to the last (cost, gain).

    Points come in the order of their costs. None for fewer than three, and where no point lies above: then the
    last part of the cost pays as much as the first.
    """
    if len(curve) < FEWEST:
        return None
    (cost, gain), (most, best) = curve[0], curve[-1]
    if most <= cost or best <= gain:
        return None
    above = [((y - gain) / (best - gain) - (x - cost) / (most - cost), x) for x, y in curve[1:-1]]
    height, at = max(above, key=lambda point: (point[0], -point[1]))
    return at if height > 0 else None
