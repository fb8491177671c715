"""Tells an answer that is wrong from one that is only noisy, and what wrong ones have in common. Pure.

On a GPU greedy answers part between identical servers, so equality is no test. Up to where two answers part, and there
too, both were given the same tokens: the gap is how far the logprobs of a position's tokens lie apart, where they part
at least half of what it takes to turn one choice into the other; behind that nothing is compared, and no gap counts.
An answer's distance from the cold one is the root mean square of its gaps over its length, in nats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Annotated, Literal

import msgspec

from kvtune.base.statistics import fisher

Verdict = Literal["differs", "cannot tell", "as cold", "not shown"]
Token = Annotated[str, msgspec.Meta(pattern="^token_id:[0-9]{1,10}$")]
Features = Mapping[str, str | int]

# Fixed before anything was measured; docs/check.md has their error rates.
FACTOR, FLOOR_NATS, MOST_NATS = 4.0, 0.005, 20.0
"""A hit is wrong if its distance is as many times the largest among cold answers, and more than this; a gap's most."""
FAULT_SHARE, POWER, LEAST_SEEN = 0.1, 0.9, 0.2
"""A path is as cold if a fault in this share of its hits would be seen with this probability. Where fewer of the
exchanged blocks are seen, no number of requests would tell."""
AGAIN, RARE, LIKELY = 2, 0.001, 0.05
"""Wrong hits are no noise, however rare, if one is wrong as often again, or if chance makes as many in fewer cases.
What they have in common is named if chance makes any feature tell as much in fewer cases."""


class Answer(msgspec.Struct, frozen=True):
    """The tokens of an answer, as vLLM names them, and at each the logprobs of the first ones, its own among them."""

    tokens: list[Token]
    tops: list[dict[Token, float]] = msgspec.field(name="top_logprobs")


def distance(cold: Answer, other: Answer) -> float:
    """Return how far an answer is from the cold one of its prompt, in nats."""
    squares = 0.0
    for token, tops, its, others in zip(cold.tokens, cold.tops, other.tokens, other.tops, strict=False):
        both = tops.keys() & others.keys()
        gap = min(MOST_NATS, median(abs(tops[each] - others[each]) for each in both)) if both else 0.0
        if token != its:
            gap = max(gap, (_margin(tops, token, its) + _margin(others, its, token)) / 2)
        squares += gap**2
        if token != its:
            break
    return math.sqrt(squares / max(1, min(len(cold.tokens), len(other.tokens))))


def _margin(tops: Mapping[str, float], chosen: str, other: str) -> float:
    """Return by how much a token was chosen before another, at least: of one not among the first, a bound is known."""
    rest = 1.0 - sum(math.exp(min(0.0, value)) for value in tops.values())
    bound = min(*tops.values(), math.log(rest) if rest > 0 else -math.inf)
    return min(MOST_NATS, max(0.0, tops[chosen] - tops.get(other, bound)))


def limit(null: Iterable[float]) -> float:
    """Return the distance beyond which an answer is wrong. `null`: distances among cold answers."""
    return max(FLOOR_NATS, FACTOR * max(null))


def judged(wrong: int, hits: int, seen: float, sure: bool = True) -> tuple[Verdict, float, int]:
    """Judge a path: the verdict, the probability to see a fault in FAULT_SHARE of the hits, how many more would do.

    `seen`: the share of prompts with an exchanged block whose answers lie beyond the limit. `sure`: noise gives no such
    wrong hits.
    """
    once = FAULT_SHARE * seen
    seen_with = 1.0 - (1.0 - once) ** hits
    if not hits or (wrong and sure):
        return "differs" if wrong else "not shown", seen_with, 0
    if wrong or seen_with >= POWER or seen < LEAST_SEEN:
        return "cannot tell" if wrong or seen_with < POWER else "as cold", seen_with, 0
    return "cannot tell", seen_with, math.ceil(math.log(1 - POWER, 1 - once)) - hits


def common(hits: Sequence[tuple[Features, bool]]) -> str:
    """Say which feature tells wrong hits best; "" if chance may. `hits`: the features of each, whether it is wrong."""
    wrong, best, text, splits = [each for _, each in hits], LIKELY, "", {}
    names = [*hits[0][0]] if hits else []
    for name in reversed(names):  # the plainest last, of those that the same hits have
        values = [features[name] for features, _ in hits]
        for value in set(values):
            splits[tuple(each == value for each in values)] = f"{name} {value}"
            if isinstance(value, int):
                splits[tuple(int(each) <= value for each in values)] = f"{name} at most {value:,}"
                splits[tuple(int(each) >= value for each in values)] = f"{name} at least {value:,}"
    for having, what in splits.items():
        size, both = sum(having), sum(map(operator.and_, having, wrong))
        if (likely := len(splits) * fisher(sum(wrong), size, both, len(hits))) < best:
            which = f"{'all' if both == sum(wrong) else both} where {what}"
            best, text = likely, f"{which} ({both} of {size} of these)" if both < size else which
    return text
