"""A workload: requests whose prompts are spans of seeded token streams. Pure data, no engine, no I/O.

A prompt is a sequence of spans `(stream, start, length)`; only an engine needs the list of tokens. Equal spans are
equal tokens, so prefix sharing and block hashes are computed without making tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvtune.data.run.types import WorkloadInfo

AUTO, BYTES = "auto", "bytes"
"""Special values of the key `tokenizer`: the model's own tokenizer, and no tokenizer (bytes)."""
STREAM_ANSWER = 1 << 62
"""Streams from here up are answers: stream `STREAM_ANSWER + i` is what request number i generates."""


class Span(NamedTuple):
    """`length` tokens of one stream, from position `start`."""

    stream: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `arrival_s`: seconds after the workload's start (open loop); None in a closed loop.

    `after`: the positions in the workload of requests that must finish first; this one is sent `think_s` seconds after
    the last of them has.
    `round` (-1: none) is for `Workload.barrier` and reports, `kind` for reports only. `session` (-1: not known): the
    conversation that it is of, for routers. `replica` (-1: not known): the engine that served it, by the log.
    """

    id: str
    prompt: tuple[Span, ...]
    output_tokens: int
    arrival_s: float | None = None
    after: tuple[int, ...] = ()
    think_s: float = 0.0
    round: int = -1
    kind: str = ""
    session: int = -1
    replica: int = -1

    @property
    def prompt_tokens(self) -> int:
        return sum(span.length for span in self.prompt)


@dataclass(frozen=True, slots=True)
class Workload:
    """A reproducible list of requests.

    `concurrency` limits the requests in flight (closed loop); None: only arrivals decide (open loop).
    With `barrier`, a round starts when the round before it has finished.
    `note`: what the workload's source does not hold, for a person; "": nothing.
    `seed` seeds the token streams. Workloads with the same `hash` do the same work.
    """

    name: str
    spec: str
    params: dict[str, str | int | float]
    seed: int
    requests: Sequence[Request] = field(repr=False)
    hash: str
    concurrency: int | None = None
    barrier: bool = False
    note: str = ""

    @property
    def info(self) -> WorkloadInfo:
        """The workload as a run file names it."""
        from kvtune.data.run.types import WorkloadInfo

        count, params = len(self.requests), dict(self.params)
        return WorkloadInfo(
            name=self.name, spec=self.spec, params=params, seed=self.seed, hash=self.hash, requests=count
        )

    @property
    def prompt_tokens(self) -> int:
        return sum(r.prompt_tokens for r in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(r.output_tokens for r in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together: the max_model_len that the workload needs."""
        return max((r.prompt_tokens + r.output_tokens for r in self.requests), default=0)


@dataclass(frozen=True, slots=True)
class Draft:
    """The requests of a workload. `concurrency`, `barrier` and `note` are those of `Workload`."""

    requests: Sequence[Request]
    concurrency: int | None = None
    barrier: bool = False
    note: str = ""
