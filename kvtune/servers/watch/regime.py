"""Says what bounds a running server, from its own counters alone: the pool, seats, full steps, the host, or nothing.

In: two scrapes of /metrics or more, and what is known of the server's limits. Out: a `Finding`: the regime or "cannot
tell", the figures that say so, what would refute it, what is missing. Pure.

vLLM's scheduler leaves a request waiting, for `capacity`, in three cases alone. It asks in this order:

    seats    max_num_seqs requests run
    steps    the step's max_num_batched_tokens are used up
    pool     too few blocks are free for the whole prompt; running requests that need a block preempt others

So a look at a moment with waiting requests names a case if the others are impossible, and a regime is what most such
looks name. What no metric has is how the time of a step is divided between device and host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import msgspec

from kvtune.base.units import count, ms, percent, span
from kvtune.servers.watch.metrics import Between, Scrape

Regime = Literal["idle", "pool-bound", "seat-bound", "compute-bound", "host-bound", "cannot tell"]
Case = Literal["seats", "steps", "pool", ""]

PROMPTS = "request_prompt_tokens"
STEPS = "iteration_tokens_total"
REQUESTS = "e2e_request_latency_seconds"
NO_SPLIT = (
    "how a step's time is divided between device and host is in no metric: `kvtune profile` measures it"
)
GIVE = "give the server's: --max-num-seqs, --max-num-batched-tokens (vLLM's GET /server_info has them, if it is open)"


class Threshold(msgspec.Struct, frozen=True):
    """A figure that a regime hangs on, with why it has this value, and who says so."""

    value: float
    shown: str
    decides: str
    reason: str
    source: str


IDLE_SHARE = Threshold(
    0.1,
    "10 %",
    "idle: no request runs or waits in any look, and the time of the requests that ended between them, all added up, "
    "is at most this share",
    "the sum of the requests' times is never below the time in which one was there",
    "vLLM's e2e_request_latency_seconds",
)
MOST_LOOKS = Threshold(
    0.5,
    "more than half",
    "of the looks, requests wait; of these looks, one case holds",
    "looks are spread evenly over time, so this is what held for most of it; a request that comes between two steps "
    "waits in a look, too, and is in few of them",
    "vLLM's num_requests_waiting_by_reason, capacity",
)
FRONT_SHARE = Threshold(
    0.5,
    "half",
    "host-bound: this share of the time of the requests that ended was neither queue nor prefill nor decode of the "
    "engine, but the API server's",
    "the larger part of the time that a person waits",
    "vLLM's e2e_request_latency_seconds, less request_queue_time_seconds and request_inference_time_seconds",
)
FULL_SHARE = Threshold(
    0.5,
    "half of max_num_batched_tokens",
    "compute-bound: a step computes this much or more, on average",
    "if at least half of the steps are full, the average cannot be below it",
    "vLLM's iteration_tokens_total",
)
STEP_S = Threshold(
    0.02,
    "20 ms",
    "compute-bound: a step takes this long or longer",
    "with a full step that is shorter, scheduling and sending may be most of it, and no metric says which",
    "the host's share of a step in kvtune's runs (`kvtune profile --on host`)",
)
SAME_LOOKS = Threshold(
    4,
    "4 looks",
    "seat-bound without a known max_num_seqs: the same number of requests, 4 or more, runs in this many looks or more "
    "while as many were answered",
    "a full step or a full pool admits by tokens, and their requests' number changes as requests come and go",
    "vLLM's num_requests_running, request_success",
)
THRESHOLDS = (IDLE_SHARE, MOST_LOOKS, FRONT_SHARE, FULL_SHARE, STEP_S, SAME_LOOKS)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is known of a server beside its metrics. 0: unknown. `seats`, `step_tokens` of each engine.

    `longest`: max_model_len. `groups`: of the model's KV cache.
    """

    seats: int = 0
    step_tokens: int = 0
    longest: int = 0
    groups: int = 0


class Fact(msgspec.Struct, frozen=True):
    """One figure of a finding, in words."""

    name: str
    value: str


class Finding(msgspec.Struct, frozen=True):
    """What bounds a server. `facts`: the figures that say so; `refuted_by`: the one that would say otherwise.

    `missing`: what the answer would need, or what makes it an inference. `looks` over `seconds`.
    """

    regime: Regime
    why: str
    facts: list[Fact]
    refuted_by: str
    missing: list[str]
    looks: int
    seconds: float

    @property
    def sentence(self) -> str:
        return f"{self.regime}: {self.why}"


def finding(scrapes: Sequence[Scrape], limits: Limits) -> Finding | None:
    """Return what bounded the server from the first scrape to the last; None of fewer than two."""
    if len(scrapes) < 2:
        return None
    seen = Seen(scrapes, limits)
    regime, why, refuted_by, *missing = _judged(seen)
    facts, seconds = list(seen.facts()), round(seen.between.seconds, 3)
    return Finding(regime, why, facts, refuted_by, missing, len(scrapes), seconds)


Judged = tuple[Regime, str, str] | tuple[Regime, str, str, str]


def _unknown(why: str, missing: str, refuted_by: str = "") -> Judged:
    return "cannot tell", why, refuted_by, missing


class Seen:
    """What the scrapes say, each figure None where the server does not publish it."""

    def __init__(self, scrapes: Sequence[Scrape], limits: Limits) -> None:
        self.scrapes, self.limits = scrapes, limits
        self.between = Between(scrapes[0], scrapes[-1])
        self.last = scrapes[-1]
        self.engines = max(1, self.last.engines)
        self.waits = [scrape for scrape in scrapes if (waiting(scrape) or 0) >= 1]
        self.deferred = any(scrape.reasons.get("deferred", 0) >= 1 for scrape in scrapes)
        counted = self.between.counted
        self.steps, tokens = counted(f"{STEPS}_count"), counted(f"{STEPS}_sum")
        self.preempted = counted("num_preemptions")
        self.answered = counted("time_to_first_token_seconds_count")
        self.ended, self.ended_s = counted(f"{REQUESTS}_count"), counted(f"{REQUESTS}_sum")
        # Both on EngineCore's clock:
        engine_s = [counted(f"request_{part}_time_seconds_sum") for part in ("queue", "inference")]
        self.front_share: float | None = None
        if self.ended and self.ended_s and None not in engine_s:
            self.front_share = max(0.0, 1 - sum(part or 0.0 for part in engine_s) / self.ended_s)
        # Little's law; the gauge shows what ran before the step under way.
        self.ran, self.prefilled = (
            self._at_once(f"request_{part}_time_seconds") for part in ("inference", "prefill")
        )
        self.step_tokens = tokens / self.steps if tokens is not None and self.steps else None
        output = counted("generation_tokens")
        self.computed: float | None = None
        if tokens is not None and output is not None and self.answered:
            self.computed = max(0.0, tokens - output) / self.answered

    @property
    def running(self) -> list[int]:
        return [int(scrape.get("num_requests_running") or 0) for scrape in self.scrapes]

    @property
    def idle(self) -> bool:
        busy = any(self.running) or self.waits or self.deferred
        short = bool(self.ended) and (self.ended_s or 0.0) <= IDLE_SHARE.value * self.between.seconds
        return not busy and (not self.steps or short)

    @property
    def step_s(self) -> float | None:
        """The mean time of a step, of each engine, if requests ran in every look."""
        return self.between.seconds * self.engines / self.steps if self.steps and all(self.running) else None

    def longest_prompt(self) -> float:
        """The tokens that no prompt exceeded since the server's start, by its histogram; else max_model_len."""
        bounds = self.last.buckets.get(PROMPTS) or {}
        total = max(bounds.values(), default=0.0)
        upto = next((bound for bound in sorted(bounds) if bound > 0 and 0 < total <= bounds[bound]), inf)
        return min(upto, self.limits.longest or inf)

    def most_needed(self) -> float:
        """The largest share of an engine's pool that the next request can need to start; infinite if unknown."""
        pool = (self.last.blocks or 0) / self.engines
        block = self.last.block_size or 0
        needs = [inf]
        if pool and block and self.limits.groups and self.longest_prompt() < inf:
            needs.append(self.limits.groups * (ceil(self.longest_prompt() / block) + 1) / pool)
        if self.engines == 1 and (fit := _float(self.last.cache.get("kv_cache_max_concurrency"))):
            needs.append(1 / fit)
        return min(needs)

    def case(self, scrape: Scrape) -> Case:
        """Return why requests wait at this look; "" if more than one case is possible."""
        use, seats = scrape.get("kv_cache_usage_perc"), self.limits.seats
        # A look after a step shows as many fewer as ended in it.
        margin = ceil(self.ended / self.steps) if self.ended and self.steps else 0
        running = (scrape.get("num_requests_running") or 0) + margin
        if seats and running >= seats * self.engines:
            return "seats"
        # No seat is taken by more than one request: with more at another look, there were free ones at this look.
        free_seat = running < (seats or max(self.running) / self.engines)
        # Of several engines only the mean is known: the fullest may be full.
        least_free = 0.0 if use is None else max(0.0, 1 - self.engines * use)
        if not free_seat:
            return ""
        if self.tight(scrape):
            return "pool"
        return "steps" if least_free >= self.most_needed() else ""

    @property
    def needs(self) -> float:
        """The share of an engine's pool that a prompt of the mean length computes; 0 if unknown."""
        pool, block = (self.last.blocks or 0) / self.engines, self.last.block_size or 0
        return self.computed / block / pool if self.computed and pool and block else 0.0

    def tight(self, scrape: Scrape) -> bool:
        """Whether even the emptiest engine has fewer free blocks than a prompt of the mean length needs."""
        use = scrape.get("kv_cache_usage_perc")
        return use is not None and min(1.0, self.engines * (1 - use)) < self.needs

    def _at_once(self, histogram: str) -> float:
        """The mean number of requests in a phase, by their time in it; 0 if that is longer than the looks."""
        spent, ended = (self.between.counted(f"{histogram}_{part}") or 0.0 for part in ("sum", "count"))
        return spent / self.between.seconds if 0 < spent <= ended * self.between.seconds else 0.0

    @property
    def fit(self) -> int:
        """The prompts of the mean length that fill the pool, if about as many ran on average; else 0.

        Only where no prompt is computed for most of the time: so no step is full.
        """
        fit = int(1 / self.needs) if self.needs and self.engines == 1 else 0
        return fit if fit == round(self.ran) and 0 < self.prefilled < MOST_LOOKS.value else 0

    def facts(self) -> Iterator[Fact]:
        limits, each = self.limits, f"of {len(self.scrapes)} looks"
        counts = [int(waiting(scrape) or 0) for scrape in self.scrapes]
        if any(counts):
            yield Fact("waiting", f"{_range(counts)} for capacity, in {len(self.waits)} {each}")
        most = f" of max_num_seqs {count(limits.seats * self.engines)}" if limits.seats else ""
        mean = f"; {self.ran:.1f} on average, by their inference time" if self.ran else ""
        yield Fact("running", f"{_range(self.running)}{most}{mean}")
        uses = [u for scrape in self.scrapes if (u := scrape.get("kv_cache_usage_perc")) is not None]
        if uses:
            need = self.most_needed()
            longest = f"; the longest request needs {percent(min(need, 1.0))} at most" if need < inf else ""
            yield Fact("pool", f"{percent(min(uses))} to {percent(max(uses))} held by requests{longest}")
        if self.preempted:
            yield Fact("preempted", count(self.preempted))
        if self.steps:
            full = f", of {count(limits.step_tokens)}" if limits.step_tokens else ""
            tokens = "" if self.step_tokens is None else f" of {count(self.step_tokens)} tokens{full}"
            length = f", {ms(1000 * self.step_s)} each" if self.step_s is not None else ""
            yield Fact("steps", f"{count(self.steps)}{tokens}{length}")
        if self.front_share is not None:
            requests = "1 request" if self.ended == 1 else f"{count(self.ended or 0)} requests"
            yield Fact("API server", f"{percent(self.front_share)} of the time of {requests} that ended")


def waiting(scrape: Scrape) -> float | None:
    """Return the requests that wait for capacity; all that wait, if the server (before vLLM 0.30) gives no reasons."""
    if scrape.reasons:
        return scrape.reasons.get("capacity", 0.0)
    return scrape.get("num_requests_waiting")


def _judged(seen: Seen) -> Judged:
    gauges = ("num_requests_running", "num_requests_waiting", f"{STEPS}_count")
    if absent := [name for name in gauges if seen.last.get(name) is None]:
        return _unknown("the server does not publish what it would take", f"missing: {', '.join(absent)}")
    if seen.preempted:
        return (
            "pool-bound",
            f"the pool had no block left: running requests were preempted {count(seen.preempted)} times",
            "no preemption, while as many requests run",
        )
    # A request that the API server reads is at no look running or waiting.
    if seen.front_share is not None and seen.front_share >= FRONT_SHARE.value and not seen.idle:
        return (
            "host-bound",
            f"{percent(seen.front_share)} of the requests' time was the API server's, before and behind the engine",
            "the same share with more API servers (--api-server-count)",
        )
    many = len(seen.waits) > MOST_LOOKS.value * len(seen.scrapes)
    return _judged_queue(seen) if many else _judged_without_queue(seen)


def _judged_without_queue(seen: Seen) -> Judged:
    if seen.idle:
        return (
            "idle",
            "no request ran or waited in any look"
            + (f", and those that ended between took {ms(1000 * seen.ended_s)}" if seen.ended_s else ""),
            "a look with a running request; a first step that has not ended yet is in no metric",
        )
    if seen.deferred:
        return _unknown(
            "requests wait, but not for capacity: vLLM defers them (LoRA adapters, KV transfers, grammars)",
            "which of the three it is, is in no metric",
        )
    some = f"requests wait in {len(seen.waits)} of {len(seen.scrapes)} looks"
    return _unknown(
        f"{some if seen.waits else 'no request waits'}: for most of the time no pool, seat or full step holds one "
        "back; what is left is a step's own time",
        NO_SPLIT,
        "requests that wait in most looks",
    )


def _judged_queue(seen: Seen) -> Judged:
    cases = Counter(seen.case(scrape) for scrape in seen.waits)
    case, number = cases.most_common(1)[0]
    if number <= MOST_LOOKS.value * len(seen.waits):
        case = ""
    seats = seen.limits.seats
    if case == "seats":
        return (
            "seat-bound",
            f"requests wait while {count(seats * seen.engines)} run, which is max_num_seqs"
            + (" of all engines" if seen.engines > 1 else ""),
            "a look with fewer running requests, and others that wait",
        )
    if case == "pool":
        why = "seats are free, and fewer blocks are free than a prompt of the mean length needs"
        return _pool(seen, why)
    if seen.fit and (not seats or seen.fit < seats):
        ran = f"{seen.ran:.1f} run on average by their inference time"
        return _pool(seen, f"{ran}, and {count(seen.fit)} of the mean length fill the pool", seen.fit)
    if case == "steps":
        return _judged_steps(seen)
    if not seats:
        return _judged_unknown_seats(seen)
    return _unknown(
        "requests wait, and more than one case is possible",
        "of pool and full steps, which holds the next request back depends on its length, which is in no metric"
        + ("; with several engines only the sum of all is known" if seen.engines > 1 else ""),
    )


def _pool(seen: Seen, why: str, running: int = 0) -> Judged:
    """The pool holds the next request back, if `running` is not all that a max_num_seqs that nobody told allows."""
    refuted_by = "requests that wait with a larger pool, as many"
    if seen.limits.seats or not running:
        return "pool-bound", f"requests wait, {why}", refuted_by
    condition = f"pool-bound, unless --max-num-seqs is {count(running)}"
    missing = f"max_num_seqs is not in /metrics: {GIVE}"
    return "pool-bound", f"requests wait, {why}: {condition}", refuted_by, missing


def _judged_steps(seen: Seen) -> Judged:
    limit, tokens = seen.limits.step_tokens, seen.step_tokens or 0.0
    if not seen.steps:
        return _unknown(
            f"requests wait though seats and blocks are free, and no step ended in {seen.between.seconds:.0f} s",
            "what a step computes is in no metric before it ends",
            "a step that ends",
        )
    if not limit or tokens < FULL_SHARE.value * limit:
        other = "what else holds them back (chunks at block ends, a connector, a pause) is in no metric"
        return _unknown(
            "requests wait though seats and blocks are free, and steps are not full on average",
            other if limit else f"max_num_batched_tokens is not in /metrics: {GIVE}",
        )
    if (seen.step_s or 0.0) < STEP_S.value:
        return _unknown(
            "requests wait for full steps, and a step is so short that the host may take most of it", NO_SPLIT
        )
    return (
        "compute-bound",
        f"requests wait though seats and blocks are free: steps of {count(tokens)} tokens, of {count(limit)}, are full",
        "the same queue with a larger max_num_batched_tokens and steps as short",
    )


def _judged_unknown_seats(seen: Seen) -> Judged:
    running = set(seen.running)
    tight = sum(map(seen.tight, seen.waits))
    if seen.engines == 1 and tight > MOST_LOOKS.value * len(seen.waits):
        why = "and fewer blocks are free than a prompt of the mean length needs"
        return _pool(seen, why, max(running))
    same = len(running) == 1 and len(seen.waits) == len(seen.scrapes) >= SAME_LOOKS.value
    if same and (seen.answered or 0) >= min(running) >= SAME_LOOKS.value:
        uses = [scrape.get("kv_cache_usage_perc") for scrape in seen.scrapes]
        if seen.engines == 1 and all(use is not None and 1 - use >= seen.most_needed() for use in uses):
            return (
                "seat-bound",
                f"requests wait, blocks are free, and in each of {len(seen.scrapes)} looks {count(min(running))} ran "
                f"while {count(seen.answered or 0)} others got their first token",
                "a look with more running requests",
                f"inferred, as max_num_seqs is not in /metrics: {GIVE}",
            )
    return _unknown(
        "requests wait, and the server does not say for what",
        f"max_num_seqs and max_num_batched_tokens are not in /metrics: {GIVE}",
    )


def _range(counts: Sequence[int]) -> str:
    return span(count(min(counts)), count(max(counts)))


def _float(text: str | None) -> float:
    """Return the number of a label; 0 if it has none."""
    try:
        value = float(text or "")
    except ValueError:
        return 0.0
    return value if 0 < value < inf else 0.0
