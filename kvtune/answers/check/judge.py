"""Tells an answer that is wrong from one that is only noisy. Pure.

On a GPU greedy answers part between identical servers, so equality is no test. Up to where two answers part, and there
too, both were given the same tokens: the gap is how far the logprobs of a position's tokens lie apart, where they part
at least half of what it takes to turn one choice into the other; behind that nothing is compared, and no gap counts.
An answer's distance from the cold one is the root mean square of its gaps over its length, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal

import msgspec

Verdict = Literal["as cold", "differs", "cannot tell", "not shown"]
Tops = Mapping[int, float]

# Fixed before anything was measured; docs/check.md has their error rates.
FACTOR = 4.0
"""A hit is wrong if its distance is as many times the largest among cold answers."""
FLOOR_NATS = 0.005
"""No hit that is nearer is wrong."""
FAULT_SHARE, POWER = 0.1, 0.9
"""A path is as cold if a fault in this share of its hits would be seen with this probability."""
LEAST_SEEN = 0.2
"""Where fewer of the exchanged blocks are seen, no number of requests would tell."""
MOST_NATS = 20.0


class Answer(msgspec.Struct, frozen=True):
    """The tokens of an answer, and at each the logprobs of the most likely ones, its own among them."""

    tokens: list[int]
    tops: list[dict[int, float]]


def parts_at(cold: Answer, other: Answer) -> int | None:
    """Return the first token that differs; None if none does."""
    return next((i for i, (a, b) in enumerate(zip(cold.tokens, other.tokens, strict=False)) if a != b), None)


def distance(cold: Answer, other: Answer) -> float:
    """Return how far an answer is from the cold one of its prompt, in nats."""
    length = min(len(cold.tokens), len(other.tokens))
    end = parts_at(cold, other)
    compared = range(length if end is None else end + 1)
    gaps = (_gap(cold.tokens[i], cold.tops[i], other.tokens[i], other.tops[i]) for i in compared)
    return math.sqrt(sum(gap * gap for gap in gaps) / max(1, length))


def _gap(token: int, tops: Tops, other: int, others: Tops) -> float:
    common = tops.keys() & others.keys()
    gap = median(abs(tops[each] - others[each]) for each in common) if common else 0.0
    if token == other:
        return gap
    return max(gap, (_margin(tops, token, other) + _margin(others, other, token)) / 2)


def _margin(tops: Tops, chosen: int, other: int) -> float:
    """Return by how much a token was chosen before another, at least: of one not among the first, a bound is known."""
    rest = 1.0 - sum(math.exp(value) for value in tops.values())
    bound = min(*tops.values(), math.log(rest) if rest > 0 else -math.inf)
    return min(MOST_NATS, max(0.0, tops[chosen] - tops.get(other, bound)))


def limit(null: Iterable[float]) -> float:
    """Return the distance beyond which an answer is wrong. `null`: distances among cold answers."""
    return max(FLOOR_NATS, FACTOR * max(null))


def judged(wrong: int, hits: int, seen: float) -> tuple[Verdict, float, int]:
    """Judge a path: the verdict, the probability to see a fault in FAULT_SHARE of the hits, how many more would do.

    `seen`: the share of prompts with an exchanged block whose answers lie beyond the limit.
    """
    once = FAULT_SHARE * seen
    seen_with = 1.0 - (1.0 - once) ** hits
    if wrong or not hits:
        return "differs" if wrong else "not shown", seen_with, 0
    if seen_with >= POWER or seen < LEAST_SEEN:
        return "as cold" if seen_with >= POWER else "cannot tell", seen_with, 0
    return "cannot tell", seen_with, math.ceil(math.log(1 - POWER, 1 - once)) - hits
