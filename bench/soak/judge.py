"""What must hold of a soak: answers of core and stock, censuses -> findings. Pure.

An answer is right when it is complete in itself and equal to stock's. Two greedy answers may part where two tokens are
equally likely except for rounding, which differs with the batch: the soak asks stock for the margin (`Parted`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.soak.client import Answer
from bench.soak.trouble import Ask
from kvtune.reading.analysis.spread import slope_interval

KIB = 1024.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be. `asks`: numbers of the requests it was seen at, none if at the whole."""

    kind: str
    text: str
    asks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Parted:
    """Two answers of one request part behind `common` tokens: the core said `core`, stock `stock`."""

    ask: int
    common: tuple[int, ...]
    core: int
    stock: int


def complete(ask: Ask, answer: Answer, stopped: bool = False) -> list[Finding]:
    """What is wrong with an answer in itself.

    `stopped`: the server got SIGTERM. It then aborts requests, and vLLM's stream leaves out a choice that was aborted
    before its first token.
    """
    wrong = []
    if answer.ended == "never":
        wrong.append("never answered")
    elif answer.ended == "broken":
        wrong.append(f"broken off: {answer.error}")
    elif answer.ended == "answered":
        choices = 3 if ask.special == "choices" else 1
        began = answer.finish
        if stopped and ask.client != "whole":
            began = [
                each for each, tokens in zip(answer.finish, answer.tokens, strict=True) if each or tokens
            ]
            choices = min(choices, len(began))
        aborted = began == [["abort"]] or (stopped and not began)
        if answer.ends != 1 or [len(each) for each in began] != [1] * choices:
            wrong.append(f"ended {answer.ends} times, its choices {[len(each) for each in answer.finish]}")
        made = sum(len(each) for each in answer.tokens)
        if answer.usage != made:
            wrong.append(f"usage says {answer.usage} tokens, {made} came")
        if ask.special == "" and made != ask.output and not aborted:
            wrong.append(f"{made} of {ask.output} tokens")
        if ask.special == "logprobs" and answer.logprobs != made:
            wrong.append(f"{answer.logprobs} logprobs for {made} tokens")
    return [
        Finding("answer", f"request {ask.number} ({ask.client} {ask.special}): {text}", (ask.number,))
        for text in wrong
    ]


def parted(ask: Ask, core: Answer, stock: Answer) -> Parted | None:
    """Where two greedy answers part; one of a client that left may end early."""
    ours, theirs = (side.tokens[0] if side.tokens else [] for side in (core, stock))
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return Parted(ask.number, tuple(ours[:at]), mine, other)
    return None


def differs(ask: Ask, core: Answer, stock: Answer) -> list[Finding]:
    """How the core's answer differs from stock's, apart from tokens (`parted`)."""
    wrong = []
    if (core.ended, core.status, core.error) != (stock.ended, stock.status, stock.error):
        # One of the two may have been through before its client left.
        if not {core.ended, stock.ended} <= {"left", "answered"}:
            wrong.append(
                f"{core.ended} {core.status} {core.error!r}, stock {stock.ended} {stock.status} {stock.error!r}"
            )
    elif core.ended == "answered" and ask.greedy and parted(ask, core, stock) is None:
        for what in ("tokens", "texts", "finish"):
            ours, theirs = getattr(core, what), getattr(stock, what)
            wrong += [f"{what} {ours}, stock's {theirs}"] if ours != theirs else []
    return [
        Finding("answer", f"request {ask.number} ({ask.client} {ask.special}): {text}", (ask.number,))
        for text in wrong
    ]


FRONT_ZERO = (
    "states",
    "parents",
    "outside_names",
    "rows_in_slots",
    "kind:RequestState",
    "kind:RequestOutputCollector",
)
ENGINE_ZERO = ("requests", "running", "waiting", "held_blocks", "missing_blocks", "block_tables")
"""What no request may leave behind."""
SLACK = {
    "handles": 4,
    "threads": 4,
    "tasks": 4,
    "kind:Row": 64,
    "kind:CachedRequestState": 4,
    "kind:Request": 4,
}
"""This many more than at the start is a leak. Counts the census itself, and what vLLM keeps until the next step."""

Census = Mapping[str, int]


def left_behind(front: Census, engine: Census, worker: Census) -> list[Finding]:
    """Requests' state that is left when none is under way."""
    found = [f"{name} {front[name]} in the API server" for name in FRONT_ZERO if front[name]]
    found += [f"{name} {engine[name]} in EngineCore" for name in ENGINE_ZERO if engine[name]]
    if worker["worker_requests"] > 1:  # it forgets a request at the next step
        found.append(f"{worker['worker_requests']} requests in the worker")
    return [Finding("left behind", text) for text in found]


def more_than_at_first(process: str, first: Census, now: Census) -> list[Finding]:
    return [
        Finding("leak", f"{process}: {now[name]} {name}, {first[name]} at first")
        for name, slack in SLACK.items()
        if name in now and now[name] > first[name] + slack
    ]


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth a request, in bytes or objects, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def grows(self) -> bool:
        """By more than a KiB a request, and not by chance."""
        return self.low > 0.0 and self.value > KIB


FEWEST = 8
"""Censuses that a slope needs."""


def slope(requests: Sequence[int], values: Sequence[int]) -> Slope | None:
    """Over the second half of the censuses; None where they are too few."""
    half = len(requests) // 2
    x, y = np.array(requests[half:], float), np.array(values[half:], float)
    if len(x) < FEWEST:
        return None
    return Slope(*slope_interval(x, y))


def p99_ratio(rounds: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float, float] | None:
    """p99 of the gaps between tokens in the last tenth of rounds over the first tenth's, with its 95 % interval.

    A tenth is three rounds at least; None where there are too few.
    Rounds are drawn anew, whole: gaps of one round are not independent.
    """
    rounds = list(filter(len, rounds))
    tenth = max(3, len(rounds) // 10)
    if len(rounds) < 4 * tenth:
        return None
    first, last = rounds[:tenth], rounds[-tenth:]
    rng = np.random.default_rng(seed)

    def p99(part: Sequence[Sequence[float]]) -> float:
        return float(np.percentile(np.concatenate([np.asarray(each) for each in part]), 99))

    def drawn(part: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        return [part[int(i)] for i in rng.integers(0, len(part), len(part))]

    ratios = [p99(drawn(last)) / p99(drawn(first)) for _ in range(400)]
    low, high = np.percentile(ratios, (2.5, 97.5))
    return p99(last) / p99(first), float(low), float(high)
