"""Computes token ids and block hashes of spans, the same on every machine.

A token id is a function of (seed, stream, position), a block hash of the spans up to the block's end. Nothing here
keeps state: any part of any stream can be computed at any time, in any order.
Used by the engine's driver, the simulator and analysis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtune.base.errors import UsageError
from kvtune.requests.loads.draws import GOLDEN, stream_base
from kvtune.requests.loads.identity import merged
from kvtune.requests.types import STREAM_ANSWER, Request, Span

FIRST_TOKEN = 10
"""Lower ids are special tokens (begin, end, padding) in most vocabularies; streams have none of them."""

Hashes = NDArray[np.uint64]

_GOLDEN = np.uint64(GOLDEN)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_STREAM = np.uint64(0xD1342543DE82EF95)
_START = np.uint64(0xAEF17502108EF2D9)
_BATCH_TOKENS = 1 << 24


def token_ids(span: Span, seed: int, vocab_size: int) -> NDArray[np.int64]:
    """Return the token ids of `span`. A position of a stream has the same token in every span that covers it."""
    if vocab_size <= FIRST_TOKEN:
        raise UsageError(
            f"the model's vocabulary of {vocab_size} tokens is too small",
            f"use a model with more than {FIRST_TOKEN}",
        )
    position = np.arange(span.start + 1, span.start + span.length + 1, dtype=np.uint64)
    mixed = _mix(np.uint64(stream_base(seed, span.stream)) + position * _GOLDEN)
    return (mixed % np.uint64(vocab_size - FIRST_TOKEN)).astype(np.int64) + FIRST_TOKEN


def prompt_ids(
    prompt: Iterable[Span],
    seed: int,
    vocab_size: int,
    answers: Mapping[int, Sequence[int]] | None = None,
) -> list[int]:
    """Return the token ids of a prompt. Answer spans are read from `answers[i]`, the tokens that request i generated.

    If an answer is missing or shorter than planned (simulator, aborted request, early stop), synthetic tokens of its
    stream fill it up: the prompt always has the planned length.
    """
    out: list[int] = []
    for span in prompt:
        generated: Sequence[int] = ()
        if answers is not None and span.stream >= STREAM_ANSWER:
            whole = answers.get(span.stream - STREAM_ANSWER, ())
            generated = whole[span.start : span.start + span.length]
            out.extend(generated)
        if len(generated) < span.length:
            rest = Span(span.stream, span.start + len(generated), span.length - len(generated))
            out.extend(token_ids(rest, seed, vocab_size).tolist())
    return out


def block_hashes(prompt: Iterable[Span], block_tokens: int) -> list[bytes]:
    """Return a hash of 8 bytes for each full block, equal only for prompts that agree up to that block's end.

    Hashes are computed from spans, not from tokens, and do not depend on how a prompt is split into spans. To hash the
    blocks that a request's output fills, append `Span(STREAM_ANSWER + index, 0, generated)` to its prompt.
    """
    out: list[bytes] = _hash_batch([tuple(prompt)], block_tokens)[0].astype("<u8").view("V8").tolist()
    return out


def hash_arrays(requests: Iterable[Request], block_tokens: int, ahead: int = 0) -> Iterator[Hashes]:
    """Yield `block_hashes` of each request's prompt as an array of numbers, computed in large batches for whole traces.

    `ahead`: each hash also covers this many tokens after its block; a block with fewer tokens after it has no hash.
    """
    batch: list[tuple[Span, ...]] = []
    tokens = 0
    for request in requests:
        batch.append(request.prompt)
        tokens += request.prompt_tokens
        if tokens >= _BATCH_TOKENS:
            yield from _hash_batch(batch, block_tokens, ahead)
            batch, tokens = [], 0
    if batch:
        yield from _hash_batch(batch, block_tokens, ahead)


def _hash_batch(prompts: Sequence[tuple[Span, ...]], block_tokens: int, ahead: int = 0) -> list[Hashes]:
    """Hash the full blocks of many prompts at once.

    A block's hash is a sum over the merged spans up to its end (plus `ahead` tokens); the last span is cut there. A
    prompt has only one form in the fewest spans, so equal content has equal sums. Each term is a 64-bit hash of a span
    and its place in the prompt, so different content has different sums.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}")
    counts, stream, start, length = merged(prompts)
    if not len(length):
        return [np.empty(0, dtype=np.uint64) for _ in prompts]
    first = np.cumsum(counts) - counts  # the first piece of each prompt
    has = counts > 0
    ends = np.cumsum(length)
    prompt_base = np.zeros(len(prompts), dtype=np.int64)
    prompt_base[has] = (ends - length)[first[has]]
    base = np.repeat(prompt_base, counts)
    begin, end = ends - length - base, ends - base  # a piece's place in its prompt
    label = _mix(stream.astype(np.uint64) * _STREAM + start.astype(np.uint64) * _START + _GOLDEN)
    label = _mix(label + begin.astype(np.uint64) * _GOLDEN)
    whole = np.cumsum(_piece(label, length))
    before = whole - _piece(label, length)  # running sums; those of earlier prompts are subtracted below
    prompt_before = np.zeros(len(prompts), dtype=np.uint64)
    prompt_before[has] = before[first[has]]
    before -= np.repeat(prompt_before, counts)
    done, reached = (np.maximum(place - ahead, 0) // block_tokens for place in (begin, end))
    blocks = reached - done  # block ends that fall into each piece
    total = int(blocks.sum())
    nth = np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    places = (np.repeat(done, blocks) + nth + 1) * block_tokens + ahead - np.repeat(begin, blocks)
    hashes = _mix(np.repeat(before, blocks) + _piece(np.repeat(label, blocks), places))
    blocks_of = np.zeros(len(prompts), dtype=np.int64)
    blocks_of[has] = reached[(first + counts - 1)[has]]
    return np.split(hashes, np.cumsum(blocks_of)[:-1])


def _piece(label: Hashes, length: NDArray[np.int64]) -> Hashes:
    return _mix(label ^ (length.astype(np.uint64) * _M2))


def _mix(value: Hashes) -> Hashes:
    value = (value ^ (value >> np.uint64(30))) * _M1
    value = (value ^ (value >> np.uint64(27))) * _M2
    return value ^ (value >> np.uint64(31))


def with_answers(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield each request with its answer appended. Equal prompts get the same answer: a span of the first one's stream.

    If a later prompt contains such an answer, that span gets the same stream, too.
    """
    first: dict[tuple[Span, ...], int] = {}
    name: dict[int, int] = {}  # request -> the earlier request with the same prompt
    for index, request in enumerate(requests):
        prompt = request.prompt
        if name and any(span.stream >= STREAM_ANSWER for span in prompt):
            prompt = tuple(
                span._replace(stream=STREAM_ANSWER + name[span.stream - STREAM_ANSWER])
                if span.stream - STREAM_ANSWER in name
                else span
                for span in prompt
            )
        earlier = first.setdefault(prompt, index)
        if earlier != index:
            name[index] = earlier
        answer = Span(STREAM_ANSWER + earlier, 0, request.output_tokens)
        yield Request(request.id, (*prompt, answer), request.output_tokens)
