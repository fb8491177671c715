"""Finds tokens that were computed before: a radix tree over spans, exact to the token.

Pure; makes no tokens. A node maps the next token `(stream, position)` to the edge that begins with this token. An edge
is a part of one stream, and is split where a prompt diverges from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvtune.requests.types import Span

Node = dict[tuple[int, int], "_Edge"]


@dataclass(slots=True)
class _Edge:
    length: int
    end: Node


class PrefixTree:
    """A radix tree of prompts. Both methods use the first `tokens` tokens of a prompt, by default all."""

    def __init__(self) -> None:
        self._root: Node = {}

    def match(self, prompt: Iterable[Span], tokens: int = sys.maxsize) -> int:
        """Return the length in tokens of the longest prefix that this prompt shares with an inserted one."""
        node, matched = self._root, 0
        for stream, start, length in joined(prompt, tokens):
            while length:
                edge = node.get((stream, start))
                if edge is None:
                    return matched
                if edge.length > length:
                    return matched + length
                matched += edge.length
                start, length, node = start + edge.length, length - edge.length, edge.end
        return matched

    def insert(self, prompt: Iterable[Span], tokens: int = sys.maxsize) -> None:
        node = self._root
        for stream, start, length in joined(prompt, tokens):
            while length:
                edge = node.get((stream, start))
                if edge is None:
                    edge = node[stream, start] = _Edge(length, {})
                elif edge.length > length:
                    rest = _Edge(edge.length - length, edge.end)
                    edge.length, edge.end = length, {(stream, start + length): rest}
                start, length, node = start + edge.length, length - edge.length, edge.end


def joined(prompt: Iterable[Span], tokens: int = sys.maxsize) -> Iterator[Span]:
    """Yield the first `tokens` tokens in the fewest spans: consecutive spans are joined, as one edge may cover both."""
    stream, start, length = 0, 0, 0
    for span in prompt:
        more = min(span.length, tokens)
        tokens -= more
        if length and span.stream == stream and span.start == start + length:
            length += more
        elif more:
            if length:
                yield Span(stream, start, length)
            stream, start, length = span.stream, span.start, more
        if not tokens:
            break
    if length:
        yield Span(stream, start, length)
