"""Appends a greedy engine's answers to requests: equal prompts get equal answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtune.workload.types import STREAM_ANSWER, Request, Span


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
        known = first.setdefault(prompt, index)
        if known != index:
            name[index] = known
        answer = Span(STREAM_ANSWER + known, 0, request.output_tokens)
        yield Request(request.id, (*prompt, answer), request.output_tokens)
