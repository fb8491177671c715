"""Requests with the answers that a greedy engine gives: equal prompts give equal answers, as far as both go. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtune.workload.types import STREAM_ANSWER, Request, Span


def with_answers(requests: Sequence[Request]) -> Iterator[Request]:
    """The requests with their answers appended, answers of equal prompts under one name.

    A turn that repeats an answer which was named after another request says so by the same name.
    """
    first: dict[tuple[Span, ...], int] = {}
    name: dict[int, int] = {}  # answer of request -> stream it is known by, where that is not its own
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
