"""Prompts as token ids: which earlier prompt agrees with one for longest. Pure.

Token ids are packed, four bytes each, so that texts sort as their tokens do: the two neighbours of a prompt in the
sorted list are the ones that agree with it for longest.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter
from typing import Generic, TypeVar

Label = TypeVar("Label")


class Prefixes(Generic[Label]):
    """Packed prompts, each with a label."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, Label]] = []

    def add(self, tokens: bytes, label: Label) -> None:
        insort(self._rows, (tokens, label), key=itemgetter(0))

    def longest(self, prompt: bytes) -> tuple[int, Label | None]:
        """How many tokens of the prompt begin an added one at most, and that one's label."""
        at = bisect_left(self._rows, prompt, key=itemgetter(0))
        best: tuple[int, Label | None] = (0, None)
        for tokens, label in self._rows[max(0, at - 1) : at + 1]:
            best = max(best, (agreeing(tokens, prompt), label), key=itemgetter(0))
        return best


def agreeing(one: bytes, other: bytes) -> int:
    """How many tokens two packed texts share at their beginning."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        half = (low + high + 1) // 2
        if one[4 * low : 4 * half] == other[4 * low : 4 * half]:
            low = half
        else:
            high = half - 1
    return low


def packed(tokens: Sequence[int]) -> bytes:
    """Four bytes a token, in the order of numbers."""
    return array("I", tokens).tobytes() if sys.byteorder == "big" else _swapped(tokens)


def _swapped(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    words.byteswap()
    return words.tobytes()


def unpacked(tokens: bytes) -> list[int]:
    return [int.from_bytes(tokens[at : at + 4], "big") for at in range(0, len(tokens), 4)]
