"""What a builder returns before it has a name: requests and how they are let go; and the identity of such work."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import nan

from kvtune.workload.types import Request, Span


@dataclass(frozen=True, slots=True)
class Plan:
    """As in `Workload`: `concurrency` None lets arrivals alone decide, `barrier` separates rounds."""

    requests: Sequence[Request]
    concurrency: int | None = None
    barrier: bool = False


def merged(prompt: Iterable[Span]) -> Iterator[Span]:
    """The same tokens in the fewest spans: empty spans dropped, spans that continue each other joined."""
    stream, start, length = 0, 0, 0
    for next_stream, next_start, next_length in prompt:
        if next_length == 0:
            continue
        if length and next_stream == stream and next_start == start + length:
            length += next_length
            continue
        if length:
            yield Span(stream, start, length)
        stream, start, length = next_stream, next_start, next_length
    if length:
        yield Span(stream, start, length)


def work_hash(plan: Plan, seed: int) -> str:
    """32 hex digits over all that makes two workloads the same work; names, ids and span cuts do not count."""
    prompts = [tuple(merged(request.prompt)) for request in plan.requests]
    numbers = array("q", chain.from_iterable(chain.from_iterable(prompts)))
    shape = array("q")
    times = array("d")
    for request, prompt in zip(plan.requests, prompts, strict=True):
        after = -1 if request.after is None else request.after
        shape.extend((len(prompt), request.output_tokens, after, request.round))
        times.extend((nan if request.arrival_s is None else request.arrival_s, request.think_s))
    head = f"kvtune workload 1 seed={seed} concurrency={plan.concurrency} barrier={plan.barrier}"
    digest = hashlib.blake2b(head.encode(), digest_size=16)
    for column in (numbers, shape, times):
        if sys.byteorder == "big":
            column.byteswap()
        digest.update(column.tobytes())
    return digest.hexdigest()
