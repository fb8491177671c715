"""Exact replays of N sessions, and the figures of one, `Seed`. In the CLI's process; simulators run the replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.answers.capacity.estimate import Estimate, Window
from kvtune.answers.capacity.pace import Pace
from kvtune.base.errors import KvtuneError
from kvtune.data.run.types import EngineInfo, Run
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.worker import Report
from kvtune.reading.bounds.loads import possible_hits
from kvtune.requests.loads.sources import Sources
from kvtune.requests.loads.spec import build, with_keys
from kvtune.requests.types import Workload

Ints = NDArray[np.int64]

PROBE = "decode:requests=1,prompt=1,output=1"
"""A load that any engine takes, to learn what the engine is."""


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """The measured requests of one replay or estimate. `kept`: their hits, as a share of an infinite cache's.

    `met`: the share of the requests within the limits that were asked for. Of a replay: `preempted`: requests;
    `computed_twice`: their tokens that were computed again, by cause; `computed_tokens`: all that steps computed;
    `busy`: the share of the time in which a step ran; `waiting`: in which a request waited for its first step;
    `pool_mean`, `pool_most`: the share of the pool that running requests held.
    """

    seed: int
    kept: float
    hit_rate: float
    infinite: float
    requests: int
    computed_per_output: float
    waiting: float
    ttft_p50_s: float
    ttft_p99_s: float
    turns_a_minute: float
    tier_hit_rate: float = 0.0
    met: float | None = None
    preempted: int | None = None
    computed_twice: dict[str, int] | None = None
    computed_tokens: int | None = None
    busy: float | None = None
    pool_mean: float | None = None
    pool_most: float | None = None

    @property
    def twice(self) -> float:
        """The share of the computed tokens that had been computed before a preemption; 0 of an estimate."""
        return sum((self.computed_twice or {}).values()) / max(1, self.computed_tokens or 0)


@dataclass(frozen=True, slots=True)
class Task:
    """One replay: `sessions` at once, drawn with `seed`.

    `shares`: the shares of the bench's window to measure, from its start; the largest first. Each gives its figures.
    `times`: how many times as long as one of the base it takes.
    """

    sessions: int
    seed: int
    setup: Setup
    shares: tuple[float, ...] = (1.0,)
    times: float = 1.0

    def work(self, window: Window) -> float:
        """Return how long it takes beside other replays of the load."""
        return self.times * self.sessions * self.within(window).end_s

    def within(self, window: Window) -> Window:
        return Window(window.warm_s, window.warm_s + self.shares[0] * (window.end_s - window.warm_s))

    def parts(self) -> Iterator[Task]:
        """Yield this task for each of its shares."""
        return (replace(self, shares=(share,)) for share in self.shares)


@dataclass(slots=True)
class Bench:
    """Replays one load. `spec`: its workload; `tokenizer`: that of the command's model."""

    simulators: Simulators
    spec: str
    hours: float
    window: Window
    tokenizer: str = ""
    slo: Mapping[str, float] = field(default_factory=dict)
    on_report: Callable[[], None] = lambda: None
    """Called whenever `pace` knows more."""
    made: int = 0
    pace: Pace = field(default_factory=Pace)
    sources: Sources = field(default_factory=Sources)
    _possible: dict[str, Ints] = field(default_factory=dict)
    """By hash of a load, what an infinite cache hits of each of its requests."""

    def engine(self, setup: Setup) -> EngineInfo:
        """Return what vLLM makes of a set-up: pool, groups, limits."""
        return self.simulators.replay(setup.with_load(build(PROBE))).header.engine

    def replayed(self, tasks: Sequence[Task], unit: int) -> Iterator[tuple[Task, Seed | KvtuneError]]:
        """Begin at once, and yield each share of each task with its figures; the tasks in any order."""
        loads: dict[int, Workload] = {}
        self.pace.at_once = self.simulators.parallel
        self.pace.plan(task.work(self.window) for task in tasks)

        def setups() -> Iterator[Setup]:
            for number, task in enumerate(tasks):
                loads[number] = self._load(task)
                ends = task.setup.replayed(end_s=task.within(self.window).end_s, token_rows=0)
                self.pace.begin(number)
                yield ends.with_load(loads[number])

        def report(now: Report) -> None:
            share = now.virtual_s / tasks[now.number].within(self.window).end_s
            self.pace.report(now.number, share, now.elapsed_s)
            self.on_report()

        ended = self.simulators.run(setups(), report)
        return self._measured(tasks, loads, ended, unit)

    def _measured(
        self,
        tasks: Sequence[Task],
        loads: dict[int, Workload],
        ended: Iterator[tuple[int, Run | KvtuneError]],
        unit: int,
    ) -> Iterator[tuple[Task, Seed | KvtuneError]]:
        for number, run in ended:
            self.made += 1
            self._ended(number, tasks[number], run)
            load = loads.pop(number)
            if load.hash not in self._possible:
                self._possible[load.hash] = np.array(possible_hits(load.requests, unit))
            for part in tasks[number].parts():
                yield part, self._figures(run, load, part)

    def _ended(self, number: int, task: Task, run: Run | KvtuneError) -> None:
        if isinstance(run, KvtuneError) or run.header.extra.sim is None or task.times != 1:
            self.pace.end(number)  # how many times as long is a guess, and says nothing of the others
        else:
            self.pace.end(number, run.header.startup_s, run.header.extra.sim.elapsed_s)

    def _figures(self, run: Run | KvtuneError, load: Workload, task: Task) -> Seed | KvtuneError:
        if isinstance(run, KvtuneError):
            return run
        window = task.within(self.window)
        within = met(run, window, self.slo) if self.slo else None
        return msgspec.structs.replace(
            figures(run, load, window, self._possible[load.hash], task), met=within
        )

    def _load(self, task: Task) -> Workload:
        spec = with_keys(self.spec, sessions=task.sessions, hours=self.hours)
        return build(spec, seed=task.seed, tokenizer=self.tokenizer, sources=self.sources)


def figures(run: Run, load: Workload, window: Window, possible_tokens: Ints, task: Task) -> Seed:
    """Return the figures of the requests that were sent in the window and admitted.

    `possible_tokens`: what an infinite cache hits of each request.
    """
    requests, steps = run.table("requests"), run.table("steps")
    taken = (requests["sent_s"] >= window.warm_s) & (requests["sent_s"] < window.end_s)
    sent = int(taken.sum())
    taken &= requests["hit_tokens"] >= 0
    possible = possible_tokens[taken].sum()
    prompt = int(requests["prompt_tokens"][taken].sum())
    hits = int(requests["hit_tokens"][taken].sum())
    begun = taken & np.isfinite(requests["first_token_s"])
    first_s = (requests["first_token_s"] - requests["sent_s"])[begun]
    length_s = window.end_s - window.warm_s
    within = (steps["t_s"] >= window.warm_s) & (steps["t_s"] < window.end_s)
    took_s = steps["step_us"][within] / 1e6
    blocks = max(1, run.header.engine.num_blocks)
    twice: dict[str, int] = {}
    for row, causes in run.header.extra.computed_twice.items():
        for cause, tokens in causes.items() if taken[int(row)] else ():
            twice[cause] = twice.get(cause, 0) + tokens
    held = 1.0 - steps["free_blocks"][within] / blocks
    return Seed(
        seed=task.seed,
        kept=float(hits / possible) if possible else 1.0,
        hit_rate=hits / max(1, prompt),
        infinite=float(possible / max(1, prompt)),
        requests=int(taken.sum()),
        computed_per_output=(prompt - hits) / max(1, int(requests["output_tokens"][taken].sum())),
        waiting=min(1.0, float(took_s[steps["waiting"][within] > 0].sum()) / length_s),
        ttft_p50_s=float(np.quantile(first_s, 0.5)) if len(first_s) else 0.0,
        ttft_p99_s=float(np.quantile(first_s, 0.99)) if len(first_s) else 0.0,
        turns_a_minute=60.0 * sent / length_s,
        tier_hit_rate=float(requests["tier_hit_tokens"][taken].sum() / max(1, prompt)),
        preempted=int((requests["preemptions"][taken] > 0).sum()),
        computed_twice=twice,
        computed_tokens=int(steps["scheduled_tokens"][within].sum()),
        busy=min(1.0, float(took_s.sum()) / length_s),
        pool_mean=float((held * took_s).sum() / length_s) if len(took_s) else 0.0,
        pool_most=float(held.max(initial=0.0)),
    )


def met(run: Run, window: Window, limits: Mapping[str, float]) -> float:
    """Return the share of the window's requests within all limits, in ms, of those that ended or wait too long."""
    requests = run.table("requests")
    sent = (requests["sent_s"] >= window.warm_s) & (requests["sent_s"] < window.end_s)
    gaps = np.maximum(1, requests["output_tokens"] - 1)
    times_s = {
        "ttft": requests["first_token_s"] - requests["sent_s"],
        "tpot": (requests["finished_s"] - requests["first_token_s"]) / gaps,
        "e2e": requests["finished_s"] - requests["sent_s"],
    }
    ended = sent & np.isfinite(requests["finished_s"])
    within = ended.copy()
    for name, most in limits.items():
        within &= np.nan_to_num(1e3 * times_s[name], nan=np.inf) <= most
    longest_s = min(limits.get("ttft", np.inf), limits.get("e2e", np.inf)) / 1e3
    stuck = sent & ~np.isfinite(requests["first_token_s"]) & (window.end_s - requests["sent_s"] > longest_s)
    return float(within.sum() / max(1, ended.sum() + stuck.sum()))


def estimated(estimate: Estimate, seed: int, window: Window) -> Seed:
    """Return an estimate's figures in the same terms."""
    return Seed(
        seed=seed,
        kept=estimate.kept,
        hit_rate=estimate.hit_rate,
        infinite=estimate.possible / max(1, estimate.prompt),
        requests=estimate.requests,
        computed_per_output=estimate.computed / max(1, estimate.output),
        waiting=estimate.waiting,
        ttft_p50_s=float(np.quantile(estimate.first_s, 0.5)) if estimate.first_s else 0.0,
        ttft_p99_s=float(np.quantile(estimate.first_s, 0.99)) if estimate.first_s else 0.0,
        turns_a_minute=60.0 * estimate.requests / (window.end_s - window.warm_s),
    )
