"""What an infinite cache would hold, exact to the token: a radix tree over spans. Pure; no token is made.

A node is a mapping from the next token `(stream, position)` to the edge that begins with it; an edge is a run
of one stream. An edge is split where a prompt leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvtune.workload.types import Span

Node = dict[tuple[int, int], "_Edge"]


@dataclass(slots=True)
class _Edge:
    length: int
    end: Node


class PrefixTree:
    def __init__(self) -> None:
        self._root: Node = {}

    def match(self, prompt: Iterable[Span]) -> int:
        """How many tokens from the prompt's start were inserted before, as the start of one prompt."""
        node, matched = self._root, 0
        for stream, start, length in _joined(prompt):
            while length:
                edge = node.get((stream, start))
                if edge is None:
                    return matched
                if edge.length > length:
                    return matched + length
                matched += edge.length
                start, length, node = start + edge.length, length - edge.length, edge.end
        return matched

    def insert(self, prompt: Iterable[Span]) -> None:
        node = self._root
        for stream, start, length in _joined(prompt):
            while length:
                edge = node.get((stream, start))
                if edge is None:
                    edge = node[stream, start] = _Edge(length, {})
                elif edge.length > length:
                    rest = _Edge(edge.length - length, edge.end)
                    edge.length, edge.end = length, {(stream, start + length): rest}
                start, length, node = start + edge.length, length - edge.length, edge.end


def _joined(prompt: Iterable[Span]) -> Iterator[tuple[int, int, int]]:
    """Spans that continue each other as one, so that none ends inside an edge that the next one follows."""
    stream, start, length = 0, 0, 0
    for span in prompt:
        if span.stream == stream and span.start == start + length and length:
            length += span.length
        elif span.length:
            if length:
                yield stream, start, length
            stream, start, length = span
    if length:
        yield stream, start, length
