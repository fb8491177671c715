"""Synthetic workloads: pure functions from their keys to a Draft.

Each function's docstring says what its token streams are. A request that waits for no other request has `arrival_s`
0.0 in an open loop, None in a closed one (concurrency > 0).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from kvtune.base.errors import TooLargeError, UsageError
from kvtune.base.units import size
from kvtune.requests.loads.draws import poisson_arrivals, uniform, zipf_picks
from kvtune.requests.types import STREAM_ANSWER, Draft, Request, Span

MOST_REQUESTS = 5_000_000
MOST_SPANS = 50_000_000
"""Most spans in all prompts of a chat: each turn repeats the turns before it."""
SPAN_BYTES = 95
"""Memory of a span while its workload is hashed, measured."""
_most: ContextVar[tuple[int, int]] = ContextVar("most", default=(MOST_REQUESTS, MOST_SPANS))


@contextlib.contextmanager
def at_most(requests: int, spans: int) -> Iterator[None]:
    """Refuse, within the `with` block, to build more requests, or more spans in all prompts of a chat.

    A run file may ask for any number.
    """
    token = _most.set((min(requests, MOST_REQUESTS), min(spans, MOST_SPANS)))
    try:
        yield
    finally:
        _most.reset(token)


def decode(
    *, requests: int, prompt: int, output: int, concurrency: int, rate: float, seed: int, kind: str = "decode"
) -> Draft:
    """Build unrelated prompts. Stream i is the prompt of request i."""
    arrivals = _arrivals(requests, concurrency, rate, seed)
    return Draft(
        [
            Request(f"{kind}-{i}", (Span(i, 0, prompt),), output, arrival_s=arrivals[i], kind=kind)
            for i in range(requests)
        ],
        concurrency or None,
    )


def rounds(
    *, prefixes: int, prefix: int, suffix: int, output: int, rounds: int, concurrency: int, seed: int
) -> Draft:
    """Build rounds that each send every prefix once, with a new suffix. Streams: the prefixes, then the suffixes."""
    _check_count(prefixes * rounds, "prefixes x rounds")
    return Draft(
        [
            Request(
                f"round-{r}-prefix-{p}",
                (Span(p, 0, prefix), Span(prefixes + r * prefixes + p, 0, suffix)),
                output,
                arrival_s=None if concurrency else 0.0,
                round=r,
                kind="prefix",
            )
            for r in range(rounds)
            for p in range(prefixes)
        ],
        concurrency or None,
        barrier=True,
    )


def zipf(
    *,
    prefixes: int,
    prefix: int,
    suffix: int,
    output: int,
    requests: int,
    s: float,
    concurrency: int,
    rate: float,
    seed: int,
) -> Draft:
    """Build prompts with prefixes drawn by popularity, each with a new suffix. Streams: prefixes, then suffixes."""
    _check_prefixes(prefixes)
    arrivals = _arrivals(requests, concurrency, rate, seed)
    picks = zipf_picks(seed, prefixes, s, requests)
    return Draft(
        [
            Request(
                f"zipf-{i}",
                (Span(p, 0, prefix), Span(prefixes + i, 0, suffix)),
                output,
                arrival_s=arrivals[i],
                kind="prefix",
            )
            for i, p in enumerate(picks)
        ],
        concurrency or None,
    )


def mix(
    *,
    prefixes: int,
    prefix: int,
    suffix: int,
    output: int,
    requests: int,
    cold: int,
    share: float,
    concurrency: int,
    rate: float,
    seed: int,
) -> Draft:
    """Build cold prompts, which never repeat (`share` of the requests), among prompts with hot prefixes.

    Hot prefixes are drawn uniformly. Streams: the hot prefixes, then one for each request (a cold prompt or a suffix).
    """
    _check_prefixes(prefixes)
    arrivals = _arrivals(requests, concurrency, rate, seed)
    chance = uniform(seed, "cold", requests)
    picks = zipf_picks(seed, prefixes, 0.0, requests)
    planned = []
    for i in range(requests):
        stream = prefixes + i
        is_cold = chance[i] < share
        prompt = (Span(stream, 0, cold),) if is_cold else (Span(picks[i], 0, prefix), Span(stream, 0, suffix))
        kind = "cold" if is_cold else "hot"
        planned.append(Request(f"{kind}-{i}", prompt, output, arrival_s=arrivals[i], kind=kind))
    return Draft(planned, concurrency or None)


def chat(
    *,
    sessions: int,
    turns: int,
    system: int,
    first: int,
    user: int,
    output: int,
    think: float,
    answers: str,
    before: int,
    cold: int,
    concurrency: int,
    rate: float,
    seed: int,
) -> Draft:
    """Build sessions that grow turn by turn, interleaved: all first turns, then all second turns, and so on.

    Turn k+1 sends the whole conversation so far, with the answer of turn k. With answers=engine (the default) the
    answer is what the engine generated: blocks filled while decoding match the next prompt, as in a real chat. With
    answers=fixed the answer is seeded text: every engine and setting gets the same tokens, but answers never hit.
    The conversations begin when the last of the `before` cold prompts has been answered.
    Streams: 0 is the shared system prompt, 1 + i the user's text of turn i, then the fixed answers, the cold prompts.
    """
    total = sessions * turns
    _check_count(before + total, "before + sessions x turns")
    if (spans := total * turns) > (most := _most.get()[1]):
        raise TooLargeError(
            f"sessions={sessions:,} of turns={turns:,} are prompts of {spans:,} parts, {size(SPAN_BYTES * spans)} "
            f"of memory, and {most:,} parts are allowed",
            "lower turns: each repeats those before it",
        )
    starts = _arrivals(sessions, concurrency, rate, seed)
    answer_base = STREAM_ANSWER + before if answers == "engine" else 1 + total
    prompts: list[tuple[Span, ...]] = []
    planned = [
        Request(f"cold-{number}", (Span(1 + 2 * total + number, 0, cold),), 1, kind="cold")
        for number in range(before)
    ]
    for index in range(total):
        turn, session = divmod(index, sessions)
        last = index - sessions
        earlier = before - 1 if turn == 0 else before + last
        if turn == 0:
            prompt: tuple[Span, ...] = (Span(0, 0, system), Span(1 + index, 0, first))
        else:
            prompt = (*prompts[last], Span(answer_base + last, 0, output), Span(1 + index, 0, user))
        prompts.append(prompt)
        planned.append(
            Request(
                f"session-{session}-turn-{turn}",
                prompt,
                output,
                arrival_s=starts[session] if turn == 0 and not before else None,
                after=() if earlier < 0 else (earlier,),
                think_s=0.0 if turn == 0 else think,
                round=turn,
                kind="turn",
            )
        )
    return Draft(planned, concurrency or None)


def _arrivals(count: int, concurrency: int, rate: float, seed: int) -> Sequence[float | None]:
    _check_count(count, "requests")
    if rate > 0:
        return poisson_arrivals(seed, rate, count)
    return [None if concurrency else 0.0] * count


def _check_prefixes(prefixes: int) -> None:
    if prefixes > MOST_REQUESTS:
        raise UsageError(
            f"prefixes = {prefixes:,} is more than {MOST_REQUESTS:,}", "lower it: each has a weight in memory"
        )


def _check_count(count: int, what: str) -> None:
    if count > (most := _most.get()[0]):
        raise TooLargeError(
            f"{what} = {count:,} requests is more than {most:,}",
            "lower it: all requests of a run are held in memory",
        )
