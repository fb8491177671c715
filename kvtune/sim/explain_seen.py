"""Which tokens an engine has seen before: a tree of spans that knows the longest shared beginning.

Exact to the token, from spans alone. Pure Python, grows by what is new in each prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtune.workload.types import Span


class SeenTokens:
    """All prompts (and answers) computed so far, as a tree of spans."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, prompt: Iterable[Span], tokens: int) -> None:
        """Remember the first `tokens` tokens of `prompt`."""
        node = self._root
        for stream, start, length in joined(prompt, tokens):
            while length:
                edge = node.edges.get((stream, start))
                if edge is None:
                    edge = node.edges[stream, start] = _Edge(length)
                elif edge.length > length:
                    # Cut the edge where this prompt ends or turns off.
                    lower = _Node()
                    lower.edges[stream, start + length] = _Edge(edge.length - length, edge.node)
                    edge.length, edge.node = length, lower
                node = edge.node
                start += edge.length
                length -= edge.length

    def known(self, prompt: Iterable[Span], limit: int) -> int:
        """How many of the first `limit` tokens of `prompt` were seen in this order from the start."""
        node, total = self._root, 0
        for stream, start, length in joined(prompt, limit):
            while length:
                edge = node.edges.get((stream, start))
                if edge is None:
                    return total
                step = min(edge.length, length)
                total += step
                if step < edge.length:
                    # The prompt ends inside the edge or turns off it: its next span begins elsewhere.
                    return total
                node = edge.node
                start += step
                length -= step
        return total


class _Node:
    __slots__ = ("edges",)

    def __init__(self) -> None:
        self.edges: dict[tuple[int, int], _Edge] = {}


class _Edge:
    __slots__ = ("length", "node")

    def __init__(self, length: int, node: _Node | None = None) -> None:
        self.length = length
        self.node = node or _Node()


def joined(prompt: Iterable[Span], limit: int) -> list[Span]:
    """The first `limit` tokens of `prompt` in the fewest spans: those that continue each other are one."""
    out: list[Span] = []
    for span in prompt:
        length = min(span.length, limit)
        if length <= 0:
            if limit <= 0:
                break
            continue
        limit -= length
        last = out[-1] if out else None
        if last is not None and last.stream == span.stream and last.start + last.length == span.start:
            out[-1] = Span(last.stream, last.start, last.length + length)
        else:
            out.append(Span(span.stream, span.start, length))
    return out
