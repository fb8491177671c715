"""Identity of prompts and workloads: prompts in the fewest spans, and a workload's hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from math import nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtune.requests.types import Draft, Span

Ints = NDArray[np.int64]


class Pieces(NamedTuple):
    """The spans of many prompts as columns, prompt after prompt; `counts[i]` of them belong to prompt i."""

    counts: Ints
    stream: Ints
    start: Ints
    length: Ints


def merged(prompts: Sequence[Sequence[Span]]) -> Pieces:
    """Return the prompts in the fewest spans: without empty spans, and with consecutive ones joined."""
    counts = np.fromiter(map(len, prompts), dtype=np.int64, count=len(prompts))
    numbers = chain.from_iterable(chain.from_iterable(prompts))
    flat = np.fromiter(numbers, dtype=np.int64, count=3 * int(counts.sum())).reshape(-1, 3)
    owner = np.repeat(np.arange(len(prompts)), counts)
    kept = flat[:, 2] != 0
    (stream, start, length), owner = flat[kept].T, owner[kept]
    first = np.ones(len(owner), dtype=bool)
    first[1:] = (
        (owner[1:] != owner[:-1])
        | (stream[1:] != stream[:-1])
        | (start[1:] != start[:-1] + length[:-1])
    )  # fmt: skip
    starts = np.flatnonzero(first)
    joined = np.add.reduceat(length, starts) if len(starts) else length
    return Pieces(np.bincount(owner[starts], minlength=len(prompts)), stream[starts], start[starts], joined)


def work_hash(plan: Draft, seed: int) -> str:
    """Return 32 hex digits that are the same for workloads that do the same work.

    Names, ids, kinds and the way in which prompts are split into spans do not change them.
    """
    requests = plan.requests
    head = f"kvtune workload 1 seed={seed} concurrency={plan.concurrency} barrier={plan.barrier}"
    digest = hashlib.blake2b(head.encode(), digest_size=16)
    whole = [(r.output_tokens, r.after[0] if r.after else -1, r.round) for r in requests]
    times = [(nan if r.arrival_s is None else r.arrival_s, r.think_s) for r in requests]
    for column in merged([request.prompt for request in requests]):
        digest.update(column.astype("<i8").tobytes())
    digest.update(np.array(whole, dtype="<i8").tobytes())
    digest.update(np.array(times, dtype="<f8").tobytes())
    joins = [(index, *r.after) for index, r in enumerate(requests) if len(r.after) > 1]
    if joins:
        digest.update(repr(joins).encode())
    return digest.hexdigest()
