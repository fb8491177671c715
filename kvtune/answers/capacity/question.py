"""How many sessions fit: estimates over all numbers and seeds, exact replays at those that are printed, remedies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from threading import Thread

import msgspec

from kvtune.answers.capacity.estimate import Engine, Window
from kvtune.answers.capacity.remedies import (
    SHARE,
    TIER_SHARE,
    TIER_TIMES,
    Option,
    against_preemptions,
    options,
)
from kvtune.answers.capacity.replays import Bench, Seed, Task, estimated
from kvtune.answers.capacity.replicas import Fleets, needed
from kvtune.answers.capacity.result import (
    Answer,
    CannotSay,
    Capacity,
    Collapse,
    CostBy,
    CostTold,
    Cut,
    EngineTold,
    Limit,
    Limits,
    LoadTold,
    Point,
    PoolTold,
    Range,
    Remedy,
    Replicas,
)
from kvtune.answers.capacity.search import FULL, MET, Estimates, fitted
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.run.types import EngineInfo
from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.build import uncollected
from kvtune.requests.loads.sessions import Load
from kvtune.requests.loads.spec import has_key, parsed, session_load, with_keys

SHARES = (0.95, 0.75, 0.5)
"""Answered beside the share that was asked for."""
CUTS = (60.0, 600.0, 1800.0, 7200.0)
CUT_SEEDS = 4
SEEDS = tuple(range(8))
"""Seeds of estimates."""
FEW_SEEDS = SEEDS[:3]
"""Those of estimates of other costs, of remedies, and of many more sessions than the answer."""
WARM_SHARE = 1 / 3
HOURS_OF_CUT = 3 / 3600
"""A load is played this long for each second of the longest pause: its warm third is one such pause,"""
HOURS_OF_SESSION = 1.5 / 3600
"""and for each second that half of the sessions take at most,"""
REQUESTS = 1000
"""or until this many requests are measured, with as many sessions as the pool holds. `hours=` sets it instead."""
FITS = 2
REMEDY_SEED = 0
REMEDIES = 4
"""About as many changes are replayed, besides a host tier."""
CLOSE, OFF = 0.01, 0.02
"""From this difference on, the estimate is fitted to the replays; from this one on after that, the answer says so."""
NEAR = 0.03
"""An estimate that is right this share of the sessions away is not off: at a cliff a session takes several points."""
EVERY_S = 10.0
"""How long it takes is said again after this."""
DRAWN = 12
"""About as many numbers of sessions are estimated for the curve alone."""
SURE_SHARE = 0.75
"""Below this only replays are shown."""
NO_MORE = "not replayed: the estimate finds no more sessions with it"
TWICE = 0.001
"""Where less of what steps compute was computed before a preemption, no remedy for that is tried."""
PLAUSIBLE = (
    StepCost(step_us=4_000.0, prefill_token_us=3.0, decode_us=60.0, kv_token_us=0.0002),
    NOMINAL,
    StepCost(
        step_us=15_000.0, prefill_token_us=70.0, decode_us=60.0, kv_token_us=0.0002, prefill_kv_us=0.0001
    ),
)
"""Costs for a device of which none are known, 23x apart: from a small model on a fast GPU to 70B on four."""


@dataclass(frozen=True, slots=True)
class Question:
    """The question. `cost_source`: where the set-up's step cost is from, "" if it is not known; `cost_by`: as `by` of
    `CostTold`.

    `sessions`: answer for this number, without a search; 0: search. `seeds`: of replays. `remedies`: are tried, too.
    `fleets`: engines that share the load, to find how many it needs.
    """

    model: str
    spec: str
    setup: Setup
    keep: float = 0.9
    cost_source: str = ""
    cost_by: CostBy = "run"
    sessions: int = 0
    seeds: int = 3
    remedies: bool = True
    tokenizer: str = ""
    slo: Mapping[str, float] = field(default_factory=dict)
    fleets: Fleets | None = None


def answer(
    question: Question, bench_of: Callable[[str, float, Window], Bench], phase: Callable[[str], None]
) -> Capacity:
    """Return the whole answer. `bench_of`: makes the bench of a spec, hours and window; `phase`: hears what is done."""
    with uncollected():  # estimates make millions of objects, too
        return _Account(question, bench_of, phase).answer()


@dataclass(frozen=True, slots=True)
class _Estimated:
    """What the fitted estimates say. `searched`: what each option keeps and what fills it, by its place."""

    asked: Answer
    answers: list[Answer]
    collapse: Collapse | None
    cuts: list[Cut]
    curve: list[Point]
    searched: dict[int, tuple[Range | None, Range | None]]


class _Account:
    def __init__(
        self,
        question: Question,
        bench_of: Callable[[str, float, Window], Bench],
        phase: Callable[[str], None],
    ) -> None:
        self._of, self._phase = question, phase
        self._cost = question.setup.simulated.cost
        self._phase("starting the simulator")
        hours = float(parsed(question.spec, 0)[1]["hours"])
        self._bench = bench_of(question.spec, hours, window_of(hours))
        self._began_s = self._bench.pace.clock.now()
        self._bench.slo = question.slo
        self._info = self._bench.engine(question.setup)
        self._engine = engine_of(self._info, self._cost)
        self._load = self._fitting_load()
        if not has_key(question.spec, "hours"):
            hours = min(hours, hours_of(self._load, self._engine.pool))
        self._hours = self._bench.hours = hours
        self._window = self._bench.window = window_of(hours)
        near = int(self._engine.pool / prompt_mean(self._load))
        self._estimates = Estimates(self._load, self._engine, self._window, SEEDS, near)
        self._others: list[Estimates] = []
        self._factor = 1.0
        self._points: dict[int, Point] = {}
        self._firsts: dict[tuple[int, float], Seed] = {}
        """Of the base, by sessions and share of the time: what remedies are compared with."""
        self._tried: list[Option] = []
        self._outcomes: dict[int, Seed | KvtuneError] = {}
        """Of what is tried, by its place."""
        self._said: _Estimated | None = None
        self._told_s = 0.0
        """When it was said last how long it takes."""
        self._cannot_say: list[CannotSay] = []

    def _fitting_load(self) -> Load:
        """Read the sessions, each up to its first request that the engine cannot take."""
        longest = min(self._info.max_model_len, self._engine.pool)
        given = int(parsed(self._of.spec, 0)[1]["longest"])
        longest = min(longest, given) if given else longest
        self._bench.spec = with_keys(self._of.spec, longest=longest)
        return session_load(self._bench.spec, tokenizer=self._of.tokenizer, sources=self._bench.sources)

    def answer(self) -> Capacity:
        question = self._of
        self._phase("estimating")
        kept = self._search()
        ends = self._ends(kept)
        if question.remedies:
            self._tried = self._options(ends[-1])
        self._replay(self._tried_with(ends[-1], self._tried), self._of_base(ends))
        if self._is_off(OFF):
            self._fit()
            self._replay(self._of_base(self._ends(self._estimates.keeping(question.keep))))
        if question.remedies:
            self._try_against_preemptions(ends[-1])
        fitted_estimates = self._estimated()
        slo = self._limits() if question.slo else None
        replicas = self._replicas(question.fleets) if question.fleets is not None else None
        self._say_what_is_not_known(fitted_estimates.asked)
        made = [self._estimates, *self._others]
        return Capacity(
            model=question.model,
            keep=question.keep,
            hours=self._hours,
            load=self._load_told(),
            engine=msgspec.convert(self._info, EngineTold, from_attributes=True),
            pool=self._pool_told(),
            cost=CostTold(
                source=question.cost_source or "plausible",
                by=question.cost_by if question.cost_source else "plausible",
                trusted=bool(question.cost_source) and self._cost.trusted,
                step_ms=self._cost.step_us / 1e3,
                prompt_token_ms=self._cost.prefill_token_us / 1e3,
                decode_ms=self._cost.decode_us / 1e3,
                error_share=self._cost.error_share if self._cost.steps else None,
            ),
            curve=self._curve(fitted_estimates.curve),
            answers=fitted_estimates.answers,
            collapse=fitted_estimates.collapse,
            slo=slo,
            cuts=fitted_estimates.cuts,
            remedies=self._remedies(ends[-1], fitted_estimates),
            cannot_say=self._cannot_say,
            replicas=replicas,
            fitted=self._factor,
            replays=self._bench.made,
            estimates=sum(estimates.made for estimates in made),
            elapsed_s=self._bench.pace.clock.now() - self._began_s,
        )

    def _search(self) -> Range:
        """Fit the estimate to replays of one seed at that seed's answer; return the answer."""
        question = self._of
        kept = self._estimates.keeping(question.keep)
        for _ in range(FITS):
            sessions = question.sessions or self._bounded(kept.by_seed[0])
            self._replay(self._of_base([sessions], range(1)), follow=self._following(sessions))
            if (
                not self._sure()
            ):  # this seed may have fallen off a cliff: the others say whether the estimate is off
                self._replay(self._of_base([sessions]), follow=self._following(sessions))
            if not self._is_off(CLOSE):
                break
            self._fit()
            kept = self._estimates.keeping(question.keep)
        return kept

    def _ends(self, kept: Range) -> list[int]:
        """Return the numbers of sessions to replay: both ends of the answer."""
        if self._of.sessions:
            return [self._of.sessions]
        return sorted({self._bounded(kept.low), self._bounded(kept.high)})

    def _bounded(self, sessions: int) -> int:
        """Return a number of sessions that is replayed in reasonable time."""
        most = self._estimates.most
        return max(1, sessions) if sessions <= most else most // 8

    def _of_base(self, wanted: Sequence[int], seeds: Sequence[int] = ()) -> list[Task]:
        """Return the replays of these numbers of sessions that were not made, by default of each seed."""
        shares = {REMEDY_SEED: (1.0, SHARE, TIER_SHARE)}
        return [
            Task(sessions, seed, self._of.setup, shares.get(seed, (1.0,)))
            for sessions in sorted(wanted, reverse=True)
            for seed in seeds or range(self._of.seeds)
            if sessions not in self._points or all(made.seed != seed for made in self._points[sessions].seeds)
        ]

    def _tried_with(self, sessions: int, tried: Sequence[Option]) -> list[Task]:
        return [
            Task(sessions, REMEDY_SEED, option.setup, (option.share,), option.times)
            for option in tried
            if option.setup is not None
        ]

    def _following(self, sessions: int) -> list[Task]:
        """Return about as many replays as will follow the search."""
        count = 0 if self._of.sessions else 2 * self._of.seeds
        tasks = [Task(sessions, seed, self._of.setup) for seed in range(count)]
        if self._of.remedies:
            tasks.insert(0, Task(sessions, REMEDY_SEED, self._of.setup, (TIER_SHARE,), TIER_TIMES))
            tasks += [Task(sessions, REMEDY_SEED, self._of.setup, (SHARE,))] * REMEDIES
        return tasks

    def _replay(self, *tasks: Sequence[Task], follow: Sequence[Task] = ()) -> None:
        """Make the replays, the longest first: no core waits for the last. What estimates say is made meanwhile."""
        all_tasks = sorted(
            (task for some in tasks for task in some), key=lambda task: -task.work(self._window)
        )
        if not all_tasks:
            return
        ended = self._bench.replayed(all_tasks, self._engine.unit)
        before = made = self._bench.made

        def say(least_s: float = 0.0) -> None:
            if least_s <= self._bench.pace.clock.now() - self._told_s:
                self._say_left(self._bench.made - before, len(all_tasks), follow)

        self._bench.on_report = partial(say, EVERY_S)
        say()
        estimated = None if follow else beside(self._estimated)
        by_number: dict[int, list[Seed]] = {}
        places = {id(option.setup): place for place, option in enumerate(self._tried)}
        for task, figures in ended:
            if task.setup is not self._of.setup:
                self._outcomes[places[id(task.setup)]] = figures
            elif isinstance(figures, KvtuneError):
                raise figures
            elif task.shares == (1.0,):
                by_number.setdefault(task.sessions, []).append(figures)
            else:
                self._firsts[task.sessions, task.shares[0]] = figures
            if self._bench.made > made:
                made = self._bench.made
                if follow or made - before < len(all_tasks):
                    say()
        if estimated is not None:
            estimated()
        for sessions, each in by_number.items():
            each += self._points[sessions].seeds if sessions in self._points else []
            self._points[sessions] = Point.of(sessions, "replay", sorted(each, key=lambda seed: seed.seed))

    def _say_left(self, made: int, count: int, follow: Sequence[Task]) -> None:
        """Say how many replays are left, and for how long as soon as one has told it."""
        self._told_s = self._bench.pace.clock.now()
        text = (
            f"replaying: {made} of {count} replays made"
            if made
            else f"replaying: {count} replay{'s'[: count > 1]}"
        )
        left_s = self._bench.pace.left_s([task.work(self._window) for task in follow])
        text += f", about {len(follow)} follow" if follow else ""
        self._phase(text + ("" if left_s is None else f", about {left_s:.0f} s left"))

    def _off(self) -> list[tuple[int, float]]:
        """Return by how much the estimate is off at each replayed number, where it is meant to be near."""
        return [(n, self._off_by(n, seeds, kept)) for n, (seeds, kept) in self._sure().items()]

    def _off_by(self, sessions: int, seeds: Sequence[int], kept: float) -> float:
        """Return by how much the estimate is off, 0 if it is right for a number of sessions that is near."""
        off = self._estimates.kept(sessions, seeds) - kept
        away = int(NEAR * sessions)
        if abs(off) <= CLOSE or not away:
            return off
        there = self._estimates.kept(sessions + (away if off > 0 else -away), seeds) - kept
        return 0.0 if off * there <= 0 else off

    def _sure(self) -> dict[int, tuple[list[int], float]]:
        """Return, by number of sessions, the seeds whose replays keep so much that estimates are near, and their mean.

        At a cliff one seed falls and another does not: only the second says whether the estimate is off.
        """
        by_sessions = {}
        for n, point in sorted(self._points.items()):
            sure = [seed for seed in point.seeds if seed.kept >= SURE_SHARE]
            if sure:
                by_sessions[n] = [seed.seed for seed in sure], fmean(seed.kept for seed in sure)
        return by_sessions

    def _is_off(self, most: float) -> bool:
        return any(abs(off) > most for _, off in self._off()) or (
            not self._off() and self._estimates.kept(min(self._points), range(self._of.seeds)) >= SURE_SHARE
        )

    def _fit(self) -> None:
        """Fit the estimate's pool to the replays from which it is furthest."""
        near = self._off()
        if near:
            sessions = max(near, key=lambda pair: abs(pair[1]))[0]
            seeds, kept = self._sure()[sessions]
        else:
            sessions = min(self._points)
            seeds, kept = list(range(self._of.seeds)), self._points[sessions].kept.mean
        self._said = None
        self._factor *= fitted(self._estimates, sessions, seeds, kept)
        self._others.append(self._estimates)
        self._estimates = self._estimates.on(
            replace(self._engine, pool=max(1, int(self._engine.pool * self._factor)))
        )

    def _by_cost(self) -> list[Estimates]:
        """Return the estimates for each cost that the device may have."""
        if self._of.cost_source or self._of.sessions:
            return [self._estimates]
        by_cost = {each.engine.cost.prefill_token_us: each for each in (*self._others, self._estimates)}
        made = []
        for cost in PLAUSIBLE:
            estimates = by_cost.get(cost.prefill_token_us)
            if estimates is None or estimates.engine.pool != self._estimates.engine.pool:
                estimates = self._estimates.on(replace(self._estimates.engine, cost=cost))
                self._others.append(estimates)
            made.append(estimates)
        return made

    def _estimated(self) -> _Estimated:
        """Return what the fitted estimates say, made once for each fit."""
        if self._said is None:
            asked = self._answered(self._of.keep)
            shares = set() if self._of.sessions else {*SHARES} - {self._of.keep}
            self._said = _Estimated(
                asked=asked,
                answers=sorted([asked, *map(self._answered, shares)], key=lambda answer: -answer.keep),
                collapse=None if self._of.sessions else self._collapse(),
                cuts=[] if self._of.sessions else [self._cut(cut) for cut in self._cuts()],
                curve=self._drawn(asked.sessions),
                searched={
                    place: self._searched(option.engine)
                    for place, option in enumerate(self._tried)
                    if option.setup is not None and option.engine is not None
                },
            )
        return self._said

    def _answered(self, share: float) -> Answer:
        seeds = SEEDS if share >= self._of.keep else FEW_SEEDS
        own = self._estimates.keeping(share, seeds)
        usual = fmean(self._estimates.keeping(share, FEW_SEEDS).by_seed)
        by_cost = [estimates.keeping(share, FEW_SEEDS) for estimates in self._by_cost()]
        moved = max(abs(fmean(answer.by_seed) - usual) for answer in by_cost)
        sessions = own
        if len(by_cost) > 1 and moved > 1:
            sessions = Range.of([*own.by_seed, *(n for answer in by_cost for n in answer.by_seed)], own.most)
        return Answer(keep=share, sessions=sessions, limit=self._limit(own), needs_times=moved > 1)

    def _limit(self, answer: Range) -> Limit:
        sessions = round(median(answer.by_seed))
        if sessions > self._estimates.most:
            return "none"
        if not sessions:
            return "one request"
        then = [self._estimates.at(seed, sessions + 1) for seed in SEEDS]
        if fmean(seed.waiting for seed in then) <= FULL:
            return "pool"
        return "max_num_seqs" if sessions >= self._engine.max_num_seqs else "device"

    def _collapse(self) -> Collapse | None:
        numbers = [n for estimates in self._by_cost() for n in estimates.filling(FEW_SEEDS).by_seed]
        trusted = bool(self._of.cost_source) and self._cost.trusted
        return (
            Collapse(sessions=Range.of(numbers, self._estimates.most), trusted=trusted)
            if min(numbers) <= self._estimates.most
            else None
        )

    def _limits(self) -> Limits:
        """Search the sessions within the limits, and replay both ends."""
        met = self._estimates.meeting(self._of.slo)
        if not self._of.sessions:
            self._replay(self._of_base(sorted({max(1, min(n, met.most)) for n in (met.low, met.high)})))
        return Limits(limits=dict(self._of.slo), met=MET, sessions=met, trusted=self._cost.trusted)

    def _replicas(self, fleets: Fleets) -> Replicas:
        """Replay fleets, more and more engines, until they keep the hits and the limits."""
        question = self._of
        self._phase("replaying fleets")
        unit = self._engine.unit
        return needed(
            fleets,
            self._bench,
            question.setup,
            unit,
            keep=question.keep,
            slo=question.slo,
            seeds=question.seeds,
        )

    def _cuts(self) -> list[float]:
        """Return the cuts that differ for this load: those below its longest pause, and one above."""
        longest = max(node.think_s for session in self._load.sessions for node in session.nodes)
        return [cut for number, cut in enumerate(CUTS) if not number or CUTS[number - 1] < longest]

    def _cut(self, max_think: float) -> Cut:
        load = replace(self._load, rules=replace(self._load.rules, max_think=max_think))
        estimates, seeds = self._estimates, SEEDS[:CUT_SEEDS]
        if longest_pause_s(load) != longest_pause_s(self._load):
            window = window_of(max(self._hours, max_think * HOURS_OF_CUT))
            estimates = Estimates(load, self._estimates.engine, window, seeds, self._estimates.near)
            self._others.append(estimates)
        kept = estimates.keeping(self._of.keep, seeds)
        sessions = max(1, round(fmean(kept.by_seed)))
        turns = [
            estimated(estimates.at(seed, sessions), seed, estimates.window).turns_a_minute for seed in seeds
        ]
        return Cut(max_think=max_think, sessions=kept, turns_a_minute=fmean(turns))

    def _options(self, sessions: int) -> list[Option]:
        """Return what is tried with as many sessions."""
        return [
            replace(option, setup=None, why_not=NO_MORE)
            if option.doubtful and not self._brings(option)
            else option
            for option in options(self._of.setup, self._info, self._estimates.engine, sessions)
        ]

    def _try_against_preemptions(self, sessions: int) -> None:
        if any(seed.twice >= TWICE for seed in self._points[sessions].seeds):
            more = against_preemptions(self._of.setup, self._info)
            self._tried += more
            self._replay(self._tried_with(sessions, more))

    def _remedies(self, sessions: int, fitted_estimates: _Estimated) -> list[Remedy]:
        base = {
            share: Point.of(sessions, "replay", [self._firsts[sessions, share]])
            for share in (SHARE, TIER_SHARE)
        }
        searched = fitted_estimates.searched
        return [
            self._remedy(
                option, base[option.share], self._outcomes.get(place), *searched.get(place, (None, None))
            )
            for place, option in enumerate(self._tried)
        ]

    def _brings(self, option: Option) -> bool:
        assert option.engine is not None
        with_it = self._estimates.on(option.engine)
        self._others.append(with_it)
        first = self._of.keep, SEEDS[:1]
        return with_it.keeping(*first).high > self._estimates.keeping(*first).high

    def _searched(self, engine: Engine) -> tuple[Range, Range | None]:
        """Return the sessions that keep their hits, and those that fill the device, by the estimate."""
        estimates = self._estimates.on(engine)
        self._others.append(estimates)
        full = estimates.filling(FEW_SEEDS) if self._of.cost_source else None
        return estimates.keeping(self._of.keep, FEW_SEEDS), full

    def _remedy(
        self,
        option: Option,
        base: Point,
        figures: Seed | KvtuneError | None,
        sessions: Range | None,
        collapse: Range | None,
    ) -> Remedy:
        if not isinstance(figures, Seed):
            why_not = option.why_not if figures is None else figures.message
            return Remedy(
                name=option.name, flags=list(option.flags), note=option.note, base=base, why_not=why_not
            )
        return Remedy(
            name=option.name,
            flags=list(option.flags),
            note=option.note,
            base=base,
            at=Point.of(base.sessions, "replay", [figures]),
            sessions=sessions,
            collapse=collapse,
            more_memory=option.more_memory,
        )

    def _drawn(self, kept: Range) -> list[Point]:
        """Return estimates up to the answer's end, where they are near to replays."""
        most = min(kept.high, self._estimates.most)
        points = []
        for sessions in range(most, 0, -max(1, most // DRAWN)):
            seeds = [estimated(self._estimates.at(seed, sessions), seed, self._window) for seed in FEW_SEEDS]
            point = Point.of(sessions, "estimate", seeds)
            if point.kept.low >= SURE_SHARE:
                points.append(point)
        return points

    def _curve(self, drawn: Sequence[Point]) -> list[Point]:
        """Return the replayed points, and estimates between them."""
        points = {point.sessions: point for point in drawn} | self._points
        return [points[n] for n in sorted(points)]

    def _say_what_is_not_known(self, asked: Answer) -> None:
        say = self._cannot_say
        if not self._of.cost_source:
            say.append(
                CannotSay(
                    what="where the device is full",
                    why="the time of a step is not known: three plausible costs, 23x apart, give the range",
                    next="--like RUN of `kvtune profile` on that engine, or --cost token=MS,step=MS",
                )
            )
        elif not self._cost.trusted:
            say.append(
                CannotSay(
                    what="where the device is full, to a session",
                    why=f"the step cost ({self._of.cost_source}) is not trusted",
                    next="--like RUN of a longer run on a quiet machine",
                )
            )
        if self._is_off(OFF):
            say.append(
                CannotSay(
                    what="the range over seeds",
                    why="the estimate is over two points off the replays; only rows `by replay` are exact",
                    next="--sessions N replays a number of your own",
                )
            )
        longest_s = longest_pause_s(self._load)
        if self._hours < longest_s * HOURS_OF_CUT * 0.99:
            say.append(
                CannotSay(
                    what="turns after the longest pauses",
                    why=f"{self._hours:.3g} hours are short for pauses of up to {longest_s:g} s",
                    next=f"hours={longest_s * HOURS_OF_CUT:.3g}, or a lower max_think=",
                )
            )
        if asked.sessions.high > self._estimates.most:
            say.append(
                CannotSay(what="the largest number", why=f"over {self._estimates.most}", next="--sessions N")
            )
        say.append(
            CannotSay(
                what="other sessions than these",
                why="lengths, pauses and answers are those of the load",
                next="a log of your own: -w requests:path=LOG",
            )
        )

    def _load_told(self) -> LoadTold:
        nodes = [node for session in self._load.sessions for node in session.nodes]
        think = sorted(node.think_s for node in nodes if node.after) or [0.0]
        ends = [session.nodes[-1] for session in self._load.sessions]
        return LoadTold(
            workload=self._of.spec,
            sessions=len(self._load.sessions),
            requests=len(nodes),
            prompt_mean=prompt_mean(self._load),
            context_mean=fmean(node.tokens + node.output for node in ends),
            think_p50=think[len(think) // 2],
            think_p90=think[int(0.9 * (len(think) - 1))],
            cut=self._load.rules.max_think,
            cut_turns=self._load.cut_share,
            left_out_requests=self._load.left_out[0],
            notes=[self._load.note] if self._load.note else [],
        )

    def _pool_told(self) -> PoolTold:
        load = self._load_told()
        return PoolTold(
            blocks=self._info.num_blocks,
            tokens=self._engine.pool,
            bytes=self._info.pool_bytes,
            block_tokens=self._info.block_size,
            assumes=self._info.origins.get("num_blocks", ""),
            contexts=self._engine.pool / load.prompt_mean,
        )


def beside(work: Callable[[], object]) -> Callable[[], None]:
    """Begin work in a thread, which ends with the process. Return a function that waits for it and raises its error."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    def wait() -> None:
        thread.join()
        if errors:
            raise errors[0]

    thread = Thread(target=run, name="kvtune-estimates", daemon=True)
    thread.start()
    return wait


def window_of(hours: float) -> Window:
    return Window(hours * 3600 * WARM_SHARE, hours * 3600)


def hours_of(load: Load, pool: int) -> float:
    """Return how long a load has to be played, by its pauses, its sessions and the tokens of the pool."""
    turns_s = [load.turn_s(session) for session in load.sessions]
    inside = max(1.0, pool / prompt_mean(load))
    sent_s = REQUESTS / (1 - WARM_SHARE) * fmean(turn for turns in turns_s for turn in turns) / inside
    longest_s = longest_pause_s(load) * HOURS_OF_CUT
    return max(longest_s, min(median(map(sum, turns_s)) * HOURS_OF_SESSION, sent_s / 3600))


def prompt_mean(load: Load) -> float:
    return fmean(node.tokens for session in load.sessions for node in session.nodes)


def longest_pause_s(load: Load) -> float:
    return max(load.pause(node) for session in load.sessions for node in session.nodes)


def engine_of(info: EngineInfo, cost: StepCost) -> Engine:
    """Return what the estimate knows of an engine. Groups of layers share its blocks."""
    if not info.num_blocks or not info.block_size:
        raise UsageError("the engine has no KV cache", "capacity is about the hits of a KV cache")
    return Engine(
        pool=max(1, info.pool_tokens),
        unit=int(info.settings.get("hit_alignment_tokens") or info.block_size),
        chunk=int(info.settings.get("max_num_batched_tokens") or 8192),
        max_num_seqs=int(info.settings.get("max_num_seqs") or 256),
        cost=cost,
    )
