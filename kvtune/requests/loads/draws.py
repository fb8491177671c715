"""Seeded random numbers, the same on every machine and in every version: splitmix64 of a counter.

Plain Python, so that the registry of workloads imports no numpy. `tokens.py` computes the same function over arrays.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Apply the splitmix64 finalizer: a bijection of 64-bit numbers that scatters all bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def stream_base(seed: int, stream: int) -> int:
    """Return the value at which a stream's counter starts."""
    return mix((mix((seed + GOLDEN) & MASK) + (stream + 1) * GOLDEN) & MASK)


def uniform(seed: int, purpose: str, count: int) -> list[float]:
    """Draw `count` numbers in [0, 1). Draws with the same seed and another `purpose` are independent of these."""
    base = stream_base(seed, int.from_bytes(purpose.encode()[:7], "little"))
    return [(mix((base + (i + 1) * GOLDEN) & MASK) >> 11) * 2.0**-53 for i in range(count)]


def numbers(seed: int, *place: int) -> Iterator[float]:
    """Yield numbers in [0, 1) without end, for one place, such as (slot,); those of other places are independent."""
    base = seed & MASK
    for part in place:
        base = stream_base(base, part)
    while True:
        base = (base + GOLDEN) & MASK
        yield (mix(base) >> 11) * 2.0**-53


def poisson_arrivals(seed: int, rate: float, count: int) -> list[float]:
    """Draw arrival times of a Poisson process, in seconds: the first is 0, all are whole microseconds."""
    gaps = [-math.log1p(-u) / rate for u in uniform(seed, "arrival", max(count - 1, 0))]
    return [round(t, 6) for t in accumulate(gaps, initial=0.0)][:count]


def zipf_picks(seed: int, items: int, exponent: float, count: int) -> list[int]:
    """Draw `count` numbers from 0..items-1. The weight of number k is 1 / (k + 1) ** exponent."""
    weights = list(accumulate((k + 1) ** -exponent for k in range(items)))
    return [min(bisect_right(weights, u * weights[-1]), items - 1) for u in uniform(seed, "zipf", count)]
