"""Groups divergences by kind and place, each group with an example. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtune.text.divergence import Divergence, Ids
from kvtune.text.kinds import Difference, Kind, kind_of, place_of

BEFORE, AFTER, MOST = 32, 96, 256
"""Lengths in tokens of an example's text: before the difference, after it, and the difference itself."""

TextOf = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Example:
    request: str
    like: str
    at: int
    difference: Difference


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that differ from an earlier one in the same place. `example`: the one that differs earliest.

    `at`: the token at which the example differs. `after`: tokens of all requests, after the difference, that the
    earlier prompt has, too. `requests`: positions in the log.
    """

    kind: Kind
    at: int
    requests: tuple[int, ...]
    after: int
    example: Example


def grouped(divergences: Iterable[tuple[Divergence, Difference]], names: Sequence[str]) -> tuple[Group, ...]:
    """Return the groups, those with the largest `after` first. `names`: the requests' names, by number."""
    found: dict[tuple[str, str], list[tuple[Divergence, Difference]]] = {}
    for one, difference in divergences:
        found.setdefault((kind_of(difference).key, place_of(difference)), []).append((one, difference))
    groups = []
    for members in found.values():
        first, difference = min(members, key=lambda member: (member[0].at, member[0].request))
        groups.append(
            Group(
                kind_of(difference),
                first.at,
                tuple(one.request for one, _ in members),
                sum(one.after for one, _ in members),
                Example(names[first.request], names[first.like], first.at, difference),
            )
        )
    return tuple(sorted(groups, key=lambda group: (-group.after, group.at)))


def difference_of(one: Divergence, new: Ids, old: Ids, text: TextOf | None, scale: int = 1) -> Difference:
    """Return the texts around a divergence, empty ones if `text` is None. `scale`: ids per usual token."""
    places = len({piece.old - piece.new for piece in one.pieces})
    if text is None:
        return Difference("", "", "", "", reordered=one.reordered, places=places)
    was, now = one.gap
    first = one.pieces[0]
    return Difference(
        text(new[max(0, one.at - BEFORE * scale) : one.at].tolist()),
        text(old[was][: MOST * scale].tolist()),
        text(new[now][: MOST * scale].tolist()),
        text(new[first.new : first.new + min(first.length, AFTER * scale)].tolist()),
        text(_apart(old, one.at, [(p.old, p.length) for p in one.pieces])[: MOST * scale].tolist()),
        text(_apart(new, one.at, [(p.new, p.length) for p in one.pieces])[: MOST * scale].tolist()),
        one.reordered,
        places,
    )


def _apart(ids: Ids, at: int, pieces: Sequence[tuple[int, int]]) -> Ids:
    """Return the tokens that only this prompt has, up to the last token that both prompts have."""
    both = np.zeros(max(start + length for start, length in pieces), dtype=bool)
    both[:at] = True
    for start, length in pieces:
        both[start : start + length] = True
    apart: Ids = ids[: len(both)][~both]
    return apart
