"""Prompts as token ids: finds the earlier prompt with the longest common prefix. Pure.

Token ids are packed, four bytes each, big-endian: comparing or sorting the bytes compares or sorts the tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Label = TypeVar("Label")


@dataclass(slots=True)
class _Edge(Generic[Label]):
    """Consecutive tokens, the label of the first prompt with them, and the edges that follow, by their first token."""

    tokens: bytes
    label: Label
    below: dict[bytes, _Edge[Label]] = field(default_factory=dict)
    untold: int = 0
    """Tokens that were computed after a prompt that ends here, and are not known."""


class Prefixes(Generic[Label]):
    """A radix tree of packed prompts, each with a label. A prefix that several prompts share is stored only once."""

    def __init__(self) -> None:
        self._top: dict[bytes, _Edge[Label]] = {}

    def add(self, tokens: bytes, label: Label) -> None:
        below, depth = self._top, 0
        while depth < len(tokens):
            first = tokens[depth : depth + 4]
            edge = below.get(first)
            if edge is None:
                below[first] = _Edge(tokens[depth:], label)
                return
            shared = 4 * agreeing(edge.tokens, tokens[depth : depth + len(edge.tokens)])
            if shared < len(edge.tokens):
                rest = edge.tokens[shared:]
                below[first] = _Edge(edge.tokens[:shared], edge.label, {rest[:4]: edge})
                edge.tokens = rest
            below, depth = below[first].below, depth + shared

    def longest(self, prompt: bytes) -> tuple[int, Label | None]:
        """Return the length in tokens of the longest prefix that an added prompt shares, and that prompt's label.

        The label is the first added prompt's if several share the prefix, and None if none does.
        """
        below, depth = self._top, 0
        label: Label | None = None
        while (edge := below.get(prompt[depth : depth + 4])) is not None:
            shared = 4 * agreeing(edge.tokens, prompt[depth : depth + len(edge.tokens)])
            depth, label, below = depth + shared, edge.label, edge.below if shared == len(edge.tokens) else {}
        return depth // 4, label

    def leave_open(self, prompt: bytes, tokens: int) -> None:
        """`tokens` that are not known were computed after this prompt, which was added."""
        edge, below, depth = None, self._top, 0
        while depth < len(prompt) and (edge := below.get(prompt[depth : depth + 4])) is not None:
            below, depth = edge.below, depth + len(edge.tokens)
        if edge is not None and depth == len(prompt):
            edge.untold = max(edge.untold, tokens)

    def reach(self, prompt: bytes) -> int:
        """Return the most tokens that an added prompt may share, with those after it that are not known; 0: none."""
        below, depth, most = self._top, 0, 0
        while (edge := below.get(prompt[depth : depth + 4])) is not None and prompt.startswith(
            edge.tokens, depth
        ):
            below, depth = edge.below, depth + len(edge.tokens)
            most = max(most, depth // 4 + edge.untold if edge.untold else 0)
        return most


def agreeing(first: bytes, other: bytes) -> int:
    """Count the tokens in the common prefix of two packed texts."""
    low, high = 0, min(len(first), len(other)) // 4
    while low < high:
        half = (low + high + 1) // 2
        if first[4 * low : 4 * half] == other[4 * low : 4 * half]:
            low = half
        else:
            high = half - 1
    return low


def packed(tokens: Sequence[int]) -> bytes:
    """Return the tokens as bytes, four each, big-endian."""
    return array("I", tokens).tobytes() if sys.byteorder == "big" else _swapped(tokens)


def _swapped(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    words.byteswap()
    return words.tobytes()


def unpacked(tokens: bytes) -> list[int]:
    return [int.from_bytes(tokens[start : start + 4], "big") for start in range(0, len(tokens), 4)]
