"""Seeded trouble: (seed, round) -> requests and faults of a round. Pure.

A round is sent, read to its end, and looked at. HTTP servers and the simulator get the same rounds from a seed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

SEQUENCES = 16
"""--max-num-seqs of the servers."""
LONGEST = 1024
"""--max-model-len of the servers."""
FIRST_TOKEN, LAST_TOKEN = 10, 480
"""Of prompts: tokens that a tokenizer of 500 has."""

Client = Literal["reads", "whole", "cuts", "leaves", "slow", "stuck"]
"""`reads` a stream to its end; wants the answer `whole`; `cuts` the stream after `after` events; `leaves` before the
first token; is `slow`: reads an event, then waits; is `stuck`: reads one event, and the rest when the round is over."""

Special = Literal[
    "", "logprobs", "stop", "json", "choices", "sampled", "too long", "no tokens", "unknown model"
]
"""`choices`: n = 3, sampled; the last three are errors."""

SAMPLED = ("choices", "sampled")
ERRORS = ("too long", "no tokens", "unknown model")

FaultKind = Literal["reset", "pause", "clock", "py-spy"]
"""The prefix cache is reset (`value` 1: running requests too), the worker stopped for `value` seconds, the wall clock
moved by `value` seconds, py-spy attached to EngineCore and killed."""

Theme = Literal["mixed", "sessions", "storm", "burst", "churn", "specials"]
THEMES: tuple[Theme, ...] = ("mixed", "sessions", "storm", "burst", "churn", "specials")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: the first `shared` tokens of stream `stem`, then `own` tokens of its own; `output` tokens at most."""

    number: int
    at_s: float
    stem: int
    shared: int
    own: int
    output: int
    client: Client = "reads"
    after: int = 0
    special: Special = ""
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.shared + self.own

    @property
    def greedy(self) -> bool:
        return self.special not in (*SAMPLED, *ERRORS)


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    theme: Theme
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Round:
        asks = tuple(Ask(**ask) for ask in data["asks"])
        return cls(data["number"], data["theme"], asks, tuple(Fault(**each) for each in data["faults"]))


def prompt(seed: int, ask: Ask) -> list[int]:
    """The tokens of the prompt."""
    shared = np.random.default_rng((seed, 1, ask.stem)).integers(FIRST_TOKEN, LAST_TOKEN, LONGEST)
    own = np.random.default_rng((seed, 2, ask.number)).integers(FIRST_TOKEN, LAST_TOKEN, ask.own)
    return [int(token) for token in (*shared[: ask.shared], *own)]


STEMS = 24
"""Prefixes that requests of all rounds share; sessions have their own stems."""


def trouble(seed: int, number: int, scale: float = 1.0) -> Round:
    """Round `number`; `scale` times as many requests."""
    rng = np.random.default_rng((seed, 0, number))
    theme = THEMES[int(rng.integers(len(THEMES)))]
    draw = _Draw(rng, number)
    count = max(1, int(scale * rng.integers(80, 160)))
    {
        "mixed": draw.mixed,
        "sessions": draw.sessions,
        "storm": draw.storm,
        "burst": draw.burst,
        "churn": draw.churn,
        "specials": draw.specials,
    }[theme](count)
    asks = tuple(sorted(draw.asks, key=lambda ask: (ask.at_s, ask.number)))
    return Round(number, theme, asks, draw.faults(asks[-1].at_s))


class _Draw:
    """Draws the requests of one round."""

    def __init__(self, rng: np.random.Generator, number: int) -> None:
        self._rng = rng
        self._first = number * 10_000
        self.asks: list[Ask] = []

    def mixed(self, count: int) -> None:
        at = self._arrivals(count, 8.0)
        for at_s in at:
            client = self._choose(("reads", "whole", "cuts", "leaves", "slow"), (40, 40, 8, 6, 6))
            special: Special = ""
            if self._rng.random() < 0.25:
                special = self._special()
            self._ask(at_s, client=client, special=special, priority=int(self._rng.integers(-1, 2)))
        self._extremes()

    def sessions(self, count: int) -> None:
        """Conversations: each turn's prompt is the one before and some more."""
        turns = 5
        for session in range(max(1, count // turns)):
            stem = self._first + STEMS + session
            shared = int(self._rng.integers(16, 120))
            at_s = float(self._rng.uniform(0.0, 4.0))
            for _ in range(turns):
                self._ask(at_s, stem=stem, shared=shared, own=int(self._rng.integers(0, 9)))
                shared += int(self._rng.integers(16, 140))
                at_s += float(self._rng.uniform(0.5, 2.0))

    def storm(self, count: int) -> None:
        """Long answers side by side in a pool that does not hold them: requests are preempted."""
        for at_s in self._arrivals(max(1, count // 4), 1.5):
            output = int(self._rng.integers(150, 400))
            client = self._choose(("reads", "whole", "cuts", "stuck"), (40, 45, 10, 5))
            self._ask(at_s, own=int(self._rng.integers(1, 300)), output=output, client=client)

    def burst(self, count: int) -> None:
        """At least twice as many at once as may run."""
        count = max(count, 2 * SEQUENCES)
        for at_s in sorted(float(at) for at in self._rng.choice((0.0, 1.0, 4.0), count)):
            self._ask(at_s, client=self._choose(("reads", "whole"), (30, 70)))

    def churn(self, count: int) -> None:
        """Most clients go away."""
        for at_s in self._arrivals(count, 6.0):
            self._ask(at_s, client=self._choose(("cuts", "leaves", "reads", "slow"), (45, 35, 15, 5)))

    def specials(self, count: int) -> None:
        for at_s in self._arrivals(count, 8.0):
            special = self._special() if self._rng.random() < 0.7 else ""
            client = self._choose(("reads", "whole", "cuts"), (45, 45, 10))
            self._ask(at_s, special=special, client=client, priority=int(self._rng.integers(-2, 3)))
        self._extremes()

    def faults(self, end_s: float) -> tuple[Fault, ...]:
        """Resets under load in half of the rounds, one of the others in a third."""
        found = []
        if self._rng.random() < 0.5:
            times = self._rng.uniform(0.0, end_s, int(self._rng.integers(1, 4)))
            found += [Fault(float(at_s), "reset", float(at % 2)) for at, at_s in enumerate(times)]
        if self._rng.random() < 0.35:
            kinds: tuple[FaultKind, ...] = ("pause", "clock", "py-spy")
            kind = kinds[int(self._rng.integers(len(kinds)))]
            value = {
                "pause": float(self._rng.uniform(0.5, 3.0)),
                "clock": float(self._rng.choice((-7200.0, -1.0, 1.0, 86400.0))),
            }.get(kind, 0.0)
            found.append(Fault(float(self._rng.uniform(0.0, end_s)), kind, value))
        return tuple(sorted(found, key=lambda fault: fault.at_s))

    def _arrivals(self, count: int, within_s: float) -> list[float]:
        return sorted(float(at) for at in self._rng.uniform(0.0, within_s, count))

    def _choose(self, clients: tuple[Client, ...], weights: tuple[int, ...]) -> Client:
        shares = np.array(weights, float) / sum(weights)
        return clients[int(self._rng.choice(len(clients), p=shares))]

    def _special(self) -> Special:
        usual: tuple[Special, ...] = ("logprobs", "stop", "json", "choices", "sampled")
        if self._rng.random() < 0.12:
            errors: tuple[Special, ...] = ("too long", "no tokens", "unknown model")
            return errors[int(self._rng.integers(len(errors)))]
        return usual[int(self._rng.integers(len(usual)))]

    def _extremes(self) -> None:
        """A prompt of one token, and the longest that fits."""
        at_s = float(self._rng.uniform(0.0, 6.0))
        self._ask(at_s, stem=0, shared=1, own=0, output=8, client="reads")
        self._ask(at_s, stem=0, shared=LONGEST - 8, own=0, output=8, client="whole")

    def _ask(
        self,
        at_s: float,
        *,
        stem: int | None = None,
        shared: int | None = None,
        own: int | None = None,
        output: int | None = None,
        client: Client | None = None,
        special: Special = "",
        priority: int = 0,
    ) -> None:
        if stem is None:  # a few stems are asked for most of the time
            stem = min(int(self._rng.zipf(1.5)) - 1, STEMS - 1)
        if shared is None:
            shared = 32 * int(self._rng.integers(0, 10))
        if own is None:
            own = int(self._rng.integers(1, 80))
        if output is None:
            output = int(min(1 + self._rng.exponential(40.0), 160.0))
        if special == "too long":
            shared, own = LONGEST, 8
        elif special == "no tokens":
            output = 0
        else:
            own = max(own, 1 - shared)
            output = min(output, LONGEST - shared - own)
        client = client or self._choose(("reads", "whole"), (50, 50))
        if special in ERRORS:
            client = "whole"
        after = int(self._rng.integers(1, 12)) if client == "cuts" else 0
        number = self._first + len(self.asks)
        self.asks.append(Ask(number, at_s, stem, shared, own, output, client, after, special, priority))
