"""What wrong hits share: of a table of features, those that tell them from the others, by Fisher's exact test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

LIKELY = 0.05
"""A feature is named if chance would make any of them tell as much in fewer cases than this."""

Features = Mapping[str, str | int]


class Common(msgspec.Struct, frozen=True):
    """How many are wrong of the hits with a feature, and of the others."""

    what: str
    wrong: int
    hits: int
    others_wrong: int
    others: int
    chance: float


def common(hits: Sequence[tuple[Features, bool]], most: int = 3) -> list[Common]:
    """Return the features that tell wrong hits best, the best first."""
    wrong, rare = sum(each for _, each in hits), []
    splits = [each for each in _splits(hits) if 0 < len(each[1]) < len(hits)]
    for what, chosen in splits:
        inside, size = sum(chosen), len(chosen)
        falls = range(inside, min(size, wrong) + 1)
        ways = sum(math.comb(wrong, k) * math.comb(len(hits) - wrong, size - k) for k in falls)
        chance = len(splits) * ways / math.comb(len(hits), size)
        if chance < LIKELY:
            rare.append(Common(what, inside, size, wrong - inside, len(hits) - size, chance))
    return sorted(rare, key=lambda each: each.chance)[:most]


def _splits(hits: Sequence[tuple[Features, bool]]) -> Iterator[tuple[str, list[bool]]]:
    """Yield each feature in words, and which hits with it are wrong; of a figure, up to and from each value."""
    for name in hits[0][0] if hits else ():
        rows = [(features[name], wrong) for features, wrong in hits]
        for value in sorted({value for value, _ in rows}, key=str):
            if isinstance(value, str):
                yield f"{name} {value}", [wrong for each, wrong in rows if each == value]
            else:
                yield f"{name} at most {value:,}", [wrong for each, wrong in rows if int(each) <= value]
                yield f"{name} at least {value:,}", [wrong for each, wrong in rows if int(each) >= value]
