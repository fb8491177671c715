from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.base.errors import UsageError
from kvtune.requests.loads.draws import GOLDEN, MASK, mix, stream_base
from kvtune.requests.loads.tokens import FIRST_TOKEN, block_hashes, hash_arrays, prompt_ids, token_ids
from kvtune.requests.types import STREAM_ANSWER, Request, Span

streams = st.one_of(st.integers(0, 5), st.integers(0, 2**62 + 1000))
spans = st.builds(Span, streams, st.integers(0, 40), st.integers(0, 40))
prompts = st.lists(spans, max_size=6).map(tuple)


def test_golden_ids_never_change() -> None:
    assert token_ids(Span(0, 0, 6), 0, 32_000).tolist() == [23143, 6770, 1168, 9766, 16031, 11060]
    assert token_ids(Span(7, 1000, 4), 42, 262_144).tolist() == [240414, 243092, 133623, 115331]
    assert token_ids(Span(STREAM_ANSWER + 3, 0, 3), 1, 512).tolist() == [506, 167, 369]


def test_golden_hashes_never_change() -> None:
    prompt = (Span(3, 0, 20), Span(9, 5, 20))
    assert [h.hex() for h in block_hashes(prompt, 16)] == ["3b327f8fb561caf1", "924ac96d6f70bbf6"]


@given(streams, st.integers(0, 2**63 - 1), st.integers(0, 10**12), st.integers(FIRST_TOKEN + 1, 300_000))
def test_token_ids_follow_the_documented_formula(stream: int, seed: int, position: int, vocab: int) -> None:
    expected = mix((stream_base(seed, stream) + (position + 1) * GOLDEN) & MASK) % (vocab - FIRST_TOKEN)
    assert token_ids(Span(stream, position, 1), seed, vocab).tolist() == [expected + FIRST_TOKEN]


def test_token_ids_cover_the_vocabulary_except_special_tokens() -> None:
    ids = token_ids(Span(1, 0, 20_000), 0, 100)
    assert ids.min() == FIRST_TOKEN
    assert ids.max() == 99
    assert np.bincount(ids)[FIRST_TOKEN:].min() > 20_000 / 90 * 0.7


def test_a_vocabulary_with_only_special_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="vocabulary of 10"):
        token_ids(Span(0, 0, 1), 0, 10)


def test_answers_are_used_and_missing_tokens_are_synthetic() -> None:
    prompt = (Span(1, 0, 3), Span(STREAM_ANSWER + 4, 0, 5), Span(2, 0, 2))
    plain = prompt_ids(prompt, 0, 1000)
    assert len(plain) == 10
    said = prompt_ids(prompt, 0, 1000, {4: [501, 502, 503]})
    assert said == [*plain[:3], 501, 502, 503, *plain[6:]]
    assert prompt_ids(prompt, 0, 1000, {4: list(range(100, 120))})[3:8] == [100, 101, 102, 103, 104]
    assert prompt_ids((Span(STREAM_ANSWER + 4, 2, 2),), 0, 1000, {4: [5, 6, 7, 8]}) == [7, 8]
    assert prompt_ids(prompt, 0, 1000, {}) == plain


def _tokens(prompt: tuple[Span, ...]) -> list[tuple[int, int]]:
    """Tokens are the same if their stream and position are."""
    return [(span.stream, span.start + i) for span in prompt for i in range(span.length)]


@given(st.lists(prompts, min_size=1, max_size=4), st.integers(1, 33))
def test_hashes_are_equal_exactly_where_the_prompts_are(made: list[tuple[Span, ...]], block: int) -> None:
    by_content: dict[tuple[tuple[int, int], ...], bytes] = {}
    for prompt in made:
        tokens = _tokens(prompt)
        hashes = block_hashes(prompt, block)
        assert len(hashes) == len(tokens) // block
        for i, result in enumerate(hashes):
            content = tuple(tokens[: (i + 1) * block])
            assert by_content.setdefault(content, result) == result
    assert len(set(by_content.values())) == len(by_content)


@given(st.lists(prompts, max_size=5), st.integers(1, 20))
def test_batches_give_the_hashes_of_each_prompt(made: list[tuple[Span, ...]], block: int) -> None:
    requests = [Request(str(i), prompt, 1) for i, prompt in enumerate(made)]
    arrays = list(hash_arrays(requests, block))
    assert [a.astype("<u8").tobytes() for a in arrays] == [b"".join(block_hashes(p, block)) for p in made]


def test_a_hundred_thousand_different_blocks_have_different_hashes() -> None:
    requests = [Request(str(i), (Span(i % 50, 0, 1600), Span(1000 + i, 0, 1600)), 1) for i in range(1000)]
    hashes = np.concatenate(list(hash_arrays(requests, 16)))
    assert len(np.unique(hashes)) == 50 * 100 + 1000 * 100


@given(prompts, st.integers(1, 20), st.integers(1, 30))
def test_a_hash_that_looks_ahead_is_that_of_the_prompt_up_to_there(
    prompt: tuple[Span, ...], block: int, ahead: int
) -> None:
    (hashes,) = hash_arrays([Request("r", prompt, 1)], block, ahead)
    token_by_token = block_hashes(prompt, 1)
    ends = range(block + ahead, len(token_by_token) + 1, block)
    assert hashes.astype("<u8").tobytes() == b"".join(token_by_token[end - 1] for end in ends)
