"""Exact replays of N sessions, and the figures of one, `Seed`. In the CLI's process; simulators run the replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.answers.capacity.pace import Pace
from kvtune.base.errors import KvtuneError
from kvtune.data.run.extras import Router
from kvtune.data.run.types import EngineInfo, Run
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.routing import routing
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.worker import Report
from kvtune.reading.analysis.fleet import Fleet, fleet
from kvtune.reading.bounds.loads import possible_hits
from kvtune.requests.loads.sources import Sources
from kvtune.requests.loads.spec import build, has_slots, with_keys
from kvtune.requests.types import Workload

Ints = NDArray[np.int64]

PROBE = "decode:requests=1,prompt=1,output=1"
"""A load that any engine takes, to learn what the engine is."""
PART = 0.25
"""Changes are replayed for this share of the measured time, and compared with that part of the engine as it is."""


@dataclass(frozen=True, slots=True)
class Window:
    """Requests sent from `warm_s` until `end_s` are measured."""

    warm_s: float
    end_s: float

    @property
    def part(self) -> Window:
        return Window(self.warm_s, self.warm_s + PART * (self.end_s - self.warm_s))


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """The measured requests of one replay. `kept`: their hits, as a share of an infinite cache's.

    `met`: the share of the requests within the limits that were asked for. `preempted`: requests; `computed_twice`:
    their tokens that were computed again, by cause; `computed_tokens`: all that steps computed; `busy`: the share of
    the time in which a step ran; `waiting`: in which a request waited for its first step; `pool_mean`, `pool_most`: the
    share of the pool that running requests held.
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
        """The share of the computed tokens that had been computed before a preemption."""
        return sum((self.computed_twice or {}).values()) / max(1, self.computed_tokens or 0)


@dataclass(frozen=True, slots=True)
class Task:
    """One replay: `sessions` at once, drawn with `seed`.

    `change`: what of the engine differs, "" nothing; then a part of the window is measured. `times`: how many times as
    long as the engine as it is it takes. `replicas`: engines that share the load, behind `router`; 0: one engine alone.
    """

    sessions: int
    seed: int
    setup: Setup = field(compare=False)
    change: str = ""
    times: float = field(default=1.0, compare=False)
    replicas: int = 0
    router: Router = ""

    @property
    def is_plain(self) -> bool:
        """Whether it is of the engine as it is, alone."""
        return not (self.change or self.replicas)

    def end_s(self, window: Window) -> float:
        return (window.part if self.change else window).end_s

    def work(self, window: Window) -> float:
        """Return how long it takes beside other replays of the load."""
        return self.times * max(1, self.sessions) * self.end_s(window)


@dataclass(slots=True)
class Bench:
    """Replays one load, each task once. `spec`: its workload; `tokenizer`: that of the command's model."""

    simulators: Simulators
    spec: str
    hours: float
    window: Window
    tokenizer: str = ""
    slo: Mapping[str, float] = field(default_factory=dict)
    unit: int = 16
    """Hits end at multiples of this."""
    on_report: Callable[..., None] = lambda least_s=0.0: None
    """Called whenever `pace` knows more; with 0.0 whenever replays have begun."""
    replays: int = 0
    made: dict[Task, Seed | KvtuneError] = field(default_factory=dict)
    parts: dict[tuple[int, int], Seed] = field(default_factory=dict)
    """What changes are compared with: that part of the engine as it is, by sessions and seed."""
    fleets: dict[Task, Fleet | None] = field(default_factory=dict)
    """How the load was shared, of several engines."""
    running: dict[int, Task] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    sources: Sources = field(default_factory=Sources)
    _loads: dict[int, Workload] = field(default_factory=dict)

    def engine(self, setup: Setup) -> EngineInfo:
        """Return what vLLM makes of a set-up: pool, groups, limits."""
        return self.simulators.replay(setup.with_load(build(PROBE))).header.engine

    @property
    def is_free(self) -> bool:
        """Whether another replay can begin."""
        return len(self.running) < self.simulators.parallel

    def run(
        self, wanted: Callable[[], Task | None], ended: Callable[[Task], None] = lambda task: None
    ) -> None:
        """Begin what is wanted while simulators are free, until all has ended. None: nothing before one has ended."""
        while True:
            while self.is_free and (task := wanted()) is not None:
                self.begin(task)
            if not self.running:
                return
            self.on_report(0.0)
            task = self.ended()
            if isinstance(error := self.made[task], KvtuneError) and not task.change:
                raise error
            ended(task)

    def begin(self, task: Task) -> None:
        number = self.replays + len(self.running)
        self.pace.at_once = self.simulators.parallel
        self.pace.begin(number, task.work(self.window))
        self.running[number], self._loads[number] = task, (load := self._load(task))
        end_s = task.end_s(self.window) if has_slots(load.spec) else 0.0
        setup = task.setup.replayed(end_s=end_s, token_rows=0).with_load(load)
        if task.replicas:
            setup = routing(load, task.replicas, task.router if task.replicas > 1 else "").of(setup)
        self.simulators.submit(number, setup)

    def ended(self) -> Task:
        """Wait until a replay has ended; its figures are in `made`."""
        number, run = self.simulators.next_done(self._report)
        self.replays += 1
        task, load = self.running.pop(number), self._loads.pop(number)
        if isinstance(run, KvtuneError):
            self.pace.end(number)
            self.made[task] = run
            return task
        possible = np.array(possible_hits(load.requests, self.unit))
        window = self.window if has_slots(load.spec) else Window(0.0, run.header.wall_s)
        self.made[task] = part = figures(run, window.part, possible, task.seed, self.slo)
        if not task.change:
            self.made[task] = figures(run, window, possible, task.seed, self.slo)
        if task.replicas:
            self.fleets[task] = fleet(run)
        elif not task.change:
            self.parts[task.sessions, task.seed] = part
        replayed = run.header.extra.sim
        times_s = (
            (run.header.startup_s, replayed.elapsed_s) if replayed is not None and task.times == 1 else ()
        )
        self.pace.end(number, *times_s)
        return task

    def _report(self, now: Report) -> None:
        share = now.virtual_s / self.running[now.number].end_s(self.window)
        self.pace.report(now.number, share, now.elapsed_s)
        self.on_report()

    def _load(self, task: Task) -> Workload:
        spec = self.spec
        if task.sessions:
            spec = with_keys(spec, sessions=task.sessions, hours=self.hours)
        return build(spec, seed=task.seed, tokenizer=self.tokenizer, sources=self.sources)


def figures(run: Run, window: Window, possible_tokens: Ints, seed: int, slo: Mapping[str, float]) -> Seed:
    """Return the figures of the requests that were sent in the window and admitted.

    `possible_tokens`: what an infinite cache hits of each request. `slo`: limits in ms, which may be none.
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
        seed=seed,
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
        met=met(run, window, slo) if slo else None,
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
