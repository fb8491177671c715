"""The tree of spans against the definition: the longest prefix shared with any prompt so far."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtune.requests.loads.prefix_tree import PrefixTree, joined
from kvtune.requests.types import Span

# Few streams and short spans, so that prompts share, split and rejoin often.
spans = st.builds(Span, st.integers(0, 2), st.integers(0, 6), st.integers(0, 5))
prompts = st.lists(spans, max_size=5)


def tokens(prompt: list[Span]) -> list[tuple[int, int]]:
    return [(span.stream, span.start + i) for span in prompt for i in range(span.length)]


def shared(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count


@given(st.lists(st.tuples(prompts, st.integers(0, 30)), max_size=8), prompts, st.integers(0, 30))
def test_a_match_is_the_longest_shared_prefix(
    earlier: list[tuple[list[Span], int]], prompt: list[Span], limit: int
) -> None:
    seen = PrefixTree()
    for added, count in earlier:
        seen.insert(added, count)
    asked = tokens(prompt)[:limit]
    expected = max((shared(tokens(added)[:count], asked) for added, count in earlier), default=0)
    assert seen.match(prompt, limit) == expected


@given(prompts, st.lists(st.integers(0, 30), max_size=6))
def test_growing_chunk_by_chunk_is_the_same(prompt: list[Span], chunks: list[int]) -> None:
    seen = PrefixTree()
    for upto in sorted(chunks):
        seen.insert(prompt, upto)
    whole = len(tokens(prompt))
    assert seen.match(prompt, whole) == min(max(chunks, default=0), whole)


@given(prompts, st.integers(0, 30))
def test_joined_keeps_the_tokens(prompt: list[Span], limit: int) -> None:
    short = list(joined(prompt, limit))
    assert tokens(short) == tokens(prompt)[:limit]
    for left, right in pairwise(short):
        assert (left.stream, left.start + left.length) != (right.stream, right.start)
