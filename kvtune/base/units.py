"""Numbers as text with a unit: durations, bytes, counts. Used by console and pages."""

from __future__ import annotations

import math


def ms(value: float) -> str:
    """Return milliseconds as text with a fitting unit: `840 µs`, `12.3 ms`, `4.56 s`."""
    if math.isnan(value):
        return "–"
    # Each limit is where rounding reaches the next unit: 999.6 µs is shown as 1 ms.
    if abs(value) < 0.9995:
        return f"{value * 1000:.0f} µs"
    if abs(value) < 999.5:
        return f"{value:.3g} ms"
    return f"{value / 1000:.3g} s" if abs(value) < 999_500 else f"{value / 1000:,.0f} s"


def size(value: float) -> str:
    """Return bytes as text: `512 B`, `1.4 MiB`, `3.20 GiB`."""
    if math.isnan(value):
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000 or unit == "TiB":
            break
        value /= 1024
    # Three digits. From 999.5 on, .3g would write an exponent.
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.3g} {unit}"


def count(value: float) -> str:
    """Return a count as text: `950`, `12,031`, `145 M`."""
    if abs(value) >= 10_000_000:
        return f"{value / 1e6:,.0f} M"
    return f"{value:,.0f}"


def number(value: float) -> str:
    """Return a number with four digits, or all its digits before the point: `0.61`, `288.2`, `31,042`."""
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:,.4g}"


def percent(part: float | None, whole: float = 1.0, digits: int = 1) -> str:
    """Return `part` of `whole` in percent, or a dash if `whole` is 0 or the part is not known."""
    return f"{100 * part / whole:.{digits}f} %" if whole and part is not None else "–"


def span(low: str, high: str) -> str:
    """Return a range; one figure where both ends read the same."""
    return low if low == high else f"{low} to {high}"
