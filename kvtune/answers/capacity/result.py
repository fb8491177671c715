"""The answer to how many sessions fit, as data: `kvtune capacity --json`."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtune.answers.capacity.replays import Seed

SCHEMA = 1


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Every seed at `low` sessions is expected above the line, and none at `high`. Both are equal without a crossing.

    `by_seed`: the most sessions above it, of each seed that was replayed. `most`: the most that were looked for; a
    larger number means more than that.
    """

    low: int
    high: int
    by_seed: list[int]
    most: int


class LoadTold(msgspec.Struct, frozen=True, kw_only=True):
    """What is played. `think`: seconds, uncut; `cut_turns`: the share of pauses that `cut` shortens."""

    workload: str
    sessions: int
    requests: int
    prompt_mean: float
    context_mean: float
    think_p50: float
    think_p90: float
    cut: float
    cut_turns: float
    left_out_requests: int
    notes: list[str] = []


class EngineTold(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM makes of the set-up. `device`: cpu or cuda."""

    vllm: str
    device: str
    device_name: str
    like_device: str
    state_dtype: str
    async_scheduling: bool


class PoolTold(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache. `tokens`: of whole prompts; `contexts`: mean contexts that fit in it at once.

    `assumes`: what `blocks` assumes, if a device's memory gives it.
    """

    blocks: int
    tokens: int
    bytes: int
    block_tokens: int
    contexts: float
    assumes: str = ""


CostBy = Literal["run", "given", "plausible"]
"""Where step times are from: fitted to a run; given in ms; not known."""


class CostTold(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step, ms. `source` "plausible": not known; a nominal one stands for it.

    `error_share`: the mean error of its fit; None: not fitted.
    """

    source: str
    by: CostBy
    trusted: bool
    step_ms: float
    prompt_token_ms: float
    decode_ms: float
    error_share: float | None = None


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    mean: float
    low: float
    high: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """N sessions at once, replayed with some seeds."""

    sessions: int
    by: Literal["replay"] = "replay"
    kept: Kept
    seeds: list[Seed]

    @classmethod
    def of(cls, sessions: int, seeds: list[Seed]) -> Point:
        kept = [seed.kept for seed in seeds]
        return cls(
            sessions=sessions,
            kept=Kept(mean=sum(kept) / len(kept), low=min(kept), high=max(kept)),
            seeds=seeds,
        )


Limit = Literal["pool", "device", "max_num_seqs", "one request", "none"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The most sessions that keep a share of an infinite cache's hits. `limit`: what ends it."""

    keep: float
    sessions: Range
    limit: Limit


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The most sessions of whose requests a share of `met` is within the limits, in ms. `trusted`: the step cost is."""

    limits: dict[str, float]
    met: float
    sessions: Range
    trusted: bool


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the engine. `at`: it replayed with as many sessions as `base`; `why_not`: why it was not replayed.

    `more_memory`: it needs more memory of the GPU or the host, or another engine.
    """

    name: str
    flags: list[str] = []
    note: str = ""
    base: Point | None = None
    at: Point | None = None
    why_not: str = ""
    more_memory: bool = False


class FleetPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A replay of engines that share the load. `kept`: of the hits of one cache that forgets nothing.

    `enough`: it keeps the hits, and the limits (`met`: the share of requests). `balance`: the most prompt tokens that
    an engine computed, divided by the mean. `hit_rates`: of each engine.
    """

    replicas: int
    seed: int
    enough: bool
    kept: float
    hit_rate: float
    met: float | None
    balance: float | None
    hit_rates: list[float]


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """How many engines a load needs. `sessions`: at once; 0: the load as it is, e.g. a log at its own times.

    `by_seed`: the fewest of 1 to `most` that are enough; 0: `most` are not. `why_not`: why it was not replayed.
    """

    router: str
    sessions: int
    most: int
    by_seed: list[int]
    tried: list[FleetPoint]
    why_not: str = ""


class CannotSay(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    why: str
    next: str


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. `answers`: none for a number of sessions that was asked for."""

    schema: int = SCHEMA
    kind: Literal["capacity"] = "capacity"
    model: str
    keep: float
    hours: float
    load: LoadTold
    engine: EngineTold
    pool: PoolTold
    cost: CostTold
    curve: list[Point]
    answers: list[Answer]
    slo: Limits | None
    remedies: list[Remedy]
    cannot_say: list[CannotSay]
    replicas: Replicas | None = None
    replays: int = 0
    elapsed_s: float = 0.0
