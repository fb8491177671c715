"""Ranges of the numbers in a run file or a study: part of their types, so that analyses can rely on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Annotated

import msgspec

MOST = 1 << 53
"""The largest count: every whole number up to it is exact, also as a float and in a browser."""
LARGEST = 1e15
"""The largest time in seconds or microseconds, and the largest of all other numbers that are not whole."""
LAST_S = 1e12
"""Times of which analyses make sums and products are below this limit, so that those stay finite."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Whole = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Number = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LAST_S)]
Scalar = bool | Whole | Number | str


def check_numbers(decoded: object) -> None:
    """Raise ValueError, which names the field, for a number in decoded JSON that no field of any kind has."""
    for place, value in _numbers(decoded):
        if isinstance(value, int) and not abs(value) < 1 << 63:
            raise ValueError(f"{place} is a whole number of {value.bit_length():,} bits")
        if isinstance(value, float) and not (isfinite(value) and abs(value) <= LARGEST):
            raise ValueError(f"{place} is {value}, and {LARGEST:g} is the largest number")


def _numbers(decoded: object) -> Iterator[tuple[str, int | float]]:
    waiting = [("$", decoded)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(
                (f"{place}.{str(key)[:40]!a:.42}".replace("'", ""), inner) for key, inner in value.items()
            )
        elif isinstance(value, list):
            waiting.extend((f"{place}[{number}]", inner) for number, inner in enumerate(value))
        elif isinstance(value, int | float):
            yield place, value
