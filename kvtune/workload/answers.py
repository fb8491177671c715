"""Requests with the answers of a greedy engine appended: equal prompts give equal answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtune.workload.types import STREAM_ANSWER, Request, Span


def with_answers(requests: Sequence[Request]) -> Iterator[Request]:
    """Each request with its answer appended. Answers of equal prompts are spans of one stream, the first request's.

    A later turn that contains such an answer is changed to the same stream.
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
