"""Finds an earlier prompt that agrees with a prompt before and after a difference. Pure.

A prefix cache hits only tokens before the first difference. A prompt diverges from an earlier one if, after the first
difference, both have pieces of at least `LEAST` tokens in common, possibly shifted or in another order.

Earlier prompts are found by anchors. Of the hashes of each `window` consecutive tokens, the smallest among each `reach`
neighbours is an anchor: two prompts with `LEAST` equal tokens in a row have an anchor in common.

A prompt is compared with those that were cached when it came: prompts that are sent at once are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtune.requests.log.token_ids import Prefixes, agreeing, packed

LEAST = 32
"""Fewest tokens of a piece: two of vLLM's blocks on a GPU. A chat template's marks are shorter, and do not count."""
SHARE = 0.25
"""Smallest share of the tokens between the difference and the last piece's end that the pieces must cover."""
MOST_OF = 0.75
"""Share of a prompt's tokens after its first difference that one piece has: only prompts that begin more alike are
tried then."""
WINDOW = REACH = LEAST // 2
MOST_TOKENS = 64 << 20
"""Most tokens of earlier prompts that are remembered. Beyond that the older half is forgotten."""
PLACES = 16
"""Most places of one anchor in a prompt that are tried: repetitive text has the same anchor everywhere."""
BYTES_A_TOKEN = 4
"""Factor for all lengths if tokens are bytes: a usual token has about four bytes."""

Ids = NDArray[np.uint32]


class Piece(NamedTuple):
    """A piece of `length` tokens in both prompts: at token `new` of this prompt, at token `old` of the earlier one."""

    new: int
    old: int
    length: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Request number `request` agrees with the earlier request `like` in its first `at` tokens, and in `pieces` later.

    `seen`: tokens of the longest prefix that any cached prompt shares. `after`: tokens after `seen` in a piece.
    """

    request: int
    like: int
    at: int
    seen: int
    after: int
    pieces: tuple[Piece, ...]

    @property
    def gap(self) -> tuple[slice, slice]:
        """The first difference: the earlier prompt's tokens, and this one's."""
        first = self.pieces[0]
        return slice(self.at, max(self.at, first.old)), slice(self.at, first.new)

    @property
    def again(self) -> tuple[tuple[int, int], ...]:
        """Where the pieces begin and end in this prompt."""
        return tuple((piece.new, piece.new + piece.length) for piece in self.pieces)

    @property
    def reordered(self) -> bool:
        """Whether the pieces are in another order than in the earlier prompt."""
        ends = [piece.old for piece in self.pieces]
        return ends != sorted(ends)


class _Anchors(NamedTuple):
    """Hashes of a prompt's anchors, and where each begins."""

    hashes: NDArray[np.uint64]
    places: NDArray[np.int64]

    def after(self, place: int) -> _Anchors:
        first = int(np.searchsorted(self.places, place))
        return _Anchors(self.hashes[first:], self.places[first:])


class Divergences:
    """Finds divergences. Add prompts in the order in which they were sent."""

    def __init__(self, *, bytes_: bool = False) -> None:
        scale = BYTES_A_TOKEN if bytes_ else 1
        self.least, self.window, self.reach = LEAST * scale, WINDOW * scale, REACH * scale
        self._texts: dict[int, bytes] = {}  # by request, the earliest first
        self._places: dict[int, _Anchors] = {}
        self.cached: Prefixes[int] = Prefixes()
        self._anchors: dict[int, int] = {}  # hash -> the latest cached prompt that has it
        self._shown: set[int] = set()
        self._tokens = 0
        self._added = 0
        self.whole = True
        """Whether none was forgotten."""

    def add(
        self, prompt: Sequence[int], answer: Sequence[int] = (), number: int = -1, *, cached: bool = True
    ) -> tuple[int, Divergence | None]:
        """Add a prompt. Return how many of its first tokens a cached prompt shares, and the divergence or None.

        `answer`: the tokens computed after the prompt, which a later turn may repeat. `number`: the request's; by
        default the next. Unless it is `cached`, `show` says when it is.
        """
        if (
            self._tokens > MOST_TOKENS
        ):  # before, not after: the caller reads the text of the divergence's two prompts
            self._forget()
        number, tokens = number if number >= 0 else self._added, packed(prompt)
        self._added = number + 1
        seen, longest = self.cached.longest(tokens)
        here = self._anchored(_ids(tokens))
        divergence = self._diverged(number, _ids(tokens), seen, longest, here)
        self._texts[number] = tokens
        self._places[number] = here
        self._tokens += len(prompt)
        if cached:
            self.show(number, answer)
        return seen, divergence

    def show(self, number: int, answer: Sequence[int] = ()) -> None:
        """A prompt is cached from now on, with its answer, if this is known."""
        if number not in self._texts:
            return
        if len(answer) > 1:
            self._tokens += len(answer)
            self._texts[number] = whole = self._texts[number] + packed(answer[:-1])
            self._places[number] = self._anchored(_ids(whole))
        self._shown.add(number)
        self.cached.add(self._texts[number], number)
        self._anchors.update(zip(self._places[number].hashes.tolist(), repeat(number)))

    def text(self, number: int) -> Ids:
        """Return prompt and answer of an earlier request."""
        return _ids(self._texts[number])

    def _diverged(
        self, number: int, ids: Ids, seen: int, longest: int | None, here: _Anchors
    ) -> Divergence | None:
        if len(ids) - seen < self.least:
            return None
        votes = Counter(map(self._anchors.get, here.after(seen).hashes.tolist()))
        del votes[None]
        candidates = [earlier for earlier, _ in votes.most_common(2) if earlier is not None]
        if not candidates:
            return None
        if longest is not None and seen and longest not in candidates:
            candidates.append(longest)
        best: Divergence | None = None
        for like in candidates:
            if best is not None and _agrees(best, len(ids)) and (like != longest or best.at == seen):
                continue
            divergence = self._beside(number, ids, seen, like, here)
            if divergence is not None and (
                best is None
                or (divergence.at + divergence.after, divergence.at, like)
                > (best.at + best.after, best.at, best.like)
            ):
                best = divergence
        return best

    def beside(self, number: int, like: int) -> Divergence | None:
        """Return how a prompt that was added differs from this earlier one, whatever others there are."""
        if number not in self._texts or like not in self._texts:
            return None
        ids = self.text(number)
        seen = agreeing(self._texts[like], self._texts[number])
        return self._beside(number, ids, seen, like, self._places[number])

    def _beside(self, number: int, ids: Ids, seen: int, like: int, here: _Anchors) -> Divergence | None:
        first_difference = agreeing(self._texts[like], ids.astype(">u4").tobytes())
        pieces = tuple(
            self._pieces(
                ids,
                self.text(like),
                first_difference,
                here.after(first_difference),
                self._places[like].after(first_difference),
            )
        )
        after = sum(max(0, piece.new + piece.length - max(seen, piece.new)) for piece in pieces)
        if not pieces or after < max(self.least, SHARE * (pieces[-1].new + pieces[-1].length - seen)):
            return None
        return Divergence(number, like, first_difference, seen, after, pieces)

    def _pieces(
        self, new: Ids, old: Ids, first_difference: int, here: _Anchors, there: _Anchors
    ) -> Iterator[Piece]:
        """Yield the pieces of `new` from the first difference on that `old` also has, as long as possible."""
        order = np.argsort(there.hashes, kind="stable")
        hashes = there.hashes[order]
        begins, ends = (np.searchsorted(hashes, here.hashes, side) for side in ("left", "right"))
        both = np.flatnonzero(begins < ends)
        starts = here.places[both]
        done, last, number = first_difference, 0, 0
        while number < len(both):
            place, anchor = int(starts[number]), both[number]
            number += 1
            others = there.places[order[begins[anchor] : min(ends[anchor], begins[anchor] + PLACES)]]
            other = int(others[np.abs(others - place - last).argmin()])
            if not np.array_equal(new[place : place + self.window], old[other : other + self.window]):
                continue
            left = _equal(new[done:place][::-1], old[first_difference:other][::-1])
            right = _equal(new[place:], old[other:])
            if left + right >= self.least:
                yield Piece(place - left, other - left, left + right)
                done, last = place + right, other - place
                number = int(np.searchsorted(starts, done))

    def _anchored(self, ids: Ids) -> _Anchors:
        count = len(ids) - self.window + 1
        if count < 1:
            return _Anchors(np.empty(0, np.uint64), np.empty(0, np.int64))
        rolled, width, factor = ids.astype(np.uint64), 1, _FACTOR
        while width < self.window:  # a hash of twice as many tokens is made of two
            rolled = rolled[:-width] * np.uint64(factor) + rolled[width:]
            width, factor = 2 * width, factor * factor % (1 << 64)
        rolled ^= rolled >> np.uint64(29)
        rolled *= _MIX
        rolled ^= rolled >> np.uint64(32)
        places, width, reach = np.arange(count), 1, min(self.reach, count)
        while width < reach:  # the first of the smallest among twice as many neighbours
            step = min(width, reach - width)
            here, there = places[:-step], places[step:]
            places, width = np.where(rolled[there] < rolled[here], there, here), width + step
        places = places[np.append(True, places[1:] != places[:-1])]
        return _Anchors(rolled[places], places)

    def _forget(self) -> None:
        while self._tokens > MOST_TOKENS // 2 and len(self._texts) > 1:
            number = next(iter(self._texts))
            self._tokens -= len(self._texts.pop(number)) // 4
            del self._places[number]
            self._shown.discard(number)
        self._anchors = {anchor: number for anchor, number in self._anchors.items() if number in self._texts}
        self.cached, self.whole = Prefixes(), False
        for number in self._shown:
            self.cached.add(self._texts[number], number)


def _agrees(divergence: Divergence, size: int) -> bool:
    """Whether a prompt of this size has one difference, and agrees in nearly all that follows."""
    return len(divergence.pieces) == 1 and divergence.after >= MOST_OF * (size - divergence.seen)


_FACTOR = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def _ids(tokens: bytes) -> Ids:
    return np.frombuffer(tokens, dtype=">u4").astype(np.uint32)


def _equal(first: Ids, other: Ids) -> int:
    """Count the tokens that agree from the start."""
    size, place, step = min(len(first), len(other)), 0, 64
    while (
        place < size
    ):  # in steps: repetitive text has many short pieces, and each would read all that follows
        differ = first[place : min(size, place + step)] != other[place : min(size, place + step)]
        if differ.any():
            return place + int(differ.argmax())
        place, step = place + step, 2 * step
    return size
