"""What sizes of host memory are worth, for a terminal: a table a curve, its knee marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtune.analysis.study import TierCurve, TierPoint
from kvtune.recipe import text_of
from kvtune.terminal import Column, FittedTable
from kvtune.units import count

MOST = 3
"""Curves that a terminal gets."""
KNEE = "knee"


def tier_curve_tables(curves: Sequence[TierCurve], *, predicted: bool) -> Iterator[tuple[str, FittedTable]]:
    """The best curves: a line that says which engine's, and its table."""
    for curve in curves[:MOST]:
        columns = (
            Column("host memory, GiB"),
            Column("hit rate"),
            Column("of that, host memory"),
            Column("computed tokens"),
            Column("ttft, predicted" if predicted else "ttft", rank=1),
            Column("", right=False),
        )
        yield (
            f"host memory, {curve_name(curve)}",
            FittedTable(columns, [_row(p, curve) for p in curve.points], gap=2),
        )


def curve_name(curve: TierCurve) -> str:
    """The settings that its trials share, in words."""
    words = " ".join(f"{name}={text_of(value)}" for name, value in curve.settings.items())
    return f"{'stock' if curve.core == 'stock' else 'kvtune'} core, {words or 'defaults'}"


def knee_line(curve: TierCurve) -> str:
    """What the knee says."""
    first, last = curve.points[0], curve.points[-1]
    at = next((point for point in curve.points if point.gib == curve.knee), None)
    if at is None:
        return (
            f"no knee from {first.gib:g} to {last.gib:g} GiB: the last part of the memory gives as much as the first, "
            "or nothing does"
        )
    share = (at.hit_rate - first.hit_rate) / (last.hit_rate - first.hit_rate)
    return (
        f"knee at {at.gib:g} GiB: {100 * share:.0f} % of what {last.gib:g} GiB gain over "
        f"{f'{first.gib:g} GiB' if first.gib else 'none'}"
    )


def _row(point: TierPoint, curve: TierCurve) -> tuple[str, ...]:
    return (
        f"{point.gib:g}",
        f"{100 * point.hit_rate:.1f} %",
        f"{100 * point.tier_hit_rate:.1f} %",
        count(point.computed_tokens),
        "–" if point.ttft_ms is None else f"{point.ttft_ms:.1f} ms",
        KNEE if point.gib == curve.knee else "",
    )
