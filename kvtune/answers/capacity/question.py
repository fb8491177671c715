"""How many sessions fit: exact replays until the share of hits crosses the line, then what moves it at that number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import msgspec

from kvtune.answers.capacity.replays import Bench, Seed, Task, Window
from kvtune.answers.capacity.replicas import Fleets, needed
from kvtune.answers.capacity.result import (
    Answer,
    CannotSay,
    Capacity,
    CostBy,
    CostTold,
    EngineTold,
    Limit,
    Limits,
    LoadTold,
    Point,
    PoolTold,
    Remedy,
)
from kvtune.answers.capacity.search import ENOUGH_SEEDS, FEW, MET, Searches
from kvtune.answers.changes import PREEMPTED, Change, changed_flags, changes, serving, situation
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.units import percent
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.build import uncollected
from kvtune.requests.loads.sessions import Load
from kvtune.requests.loads.spec import has_key, parsed, session_load, with_keys

WARM_SHARE = 1 / 3
HOURS_OF_CUT = 3 / 3600
"""A load is played this long for each second of the longest pause: its warm third is one such pause,"""
HOURS_OF_SESSION = 1.5 / 3600
"""and for each second that half of the sessions take at most,"""
REQUESTS = 1000
"""or until this many requests are measured, with as many sessions as the pool holds. `hours=` sets it instead."""
LEAST_FIRST = 4
"""A search begins with as many sessions as mean prompts fit in the pool, and with these at least."""
MOST, LEAST_MOST = 512, 16
"""More sessions than the first are never looked for, fewer than the second always. Powers of two."""
MOST_REQUESTS = 20_000
"""Numbers of sessions that send about as many requests are not looked for: each replay would take minutes."""
MINUTE_S = 60.0
"""Further seeds are replayed while all is expected to end in this time."""
EVERY_S = 10.0
"""How long it takes is said again after this."""
FULL = 0.5
"""A device is full where a prompt waits for its turn in more than this share of the time."""
WAITS, AT_ONCE = 0.1, {"max-num-batched-tokens", "max-num-seqs"}
"""Where prompts wait for a smaller share of the time, these flags are not tried: they fill steps otherwise."""
ALL = 0.999
"""Where this share of the hits is kept, a larger cache brings nothing."""
TWICE = 0.001
"""Where less of what steps compute was computed before a preemption, no remedy for that is tried."""
SEED = 0
"""That of the changes."""


@dataclass(frozen=True, slots=True)
class Question:
    """The question. `cost_source`: where the set-up's step cost is from, "" if it is not known; `cost_by`: as `by` of
    `CostTold`.

    `sessions`: answer for this number, without a search; 0: search. `seeds`: that are searched. `remedies`: are tried,
    too. `fleets`: engines that share the load, to find how many it needs.
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
    with uncollected():  # loads are millions of objects, too
        return _Account(question, bench_of, phase).answer()


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
        self._began_s = self._told_s = self._bench.pace.clock.now()
        self._bench.slo = question.slo
        self._info = self._bench.engine(question.setup)
        if not self._info.num_blocks or not self._info.block_size:
            raise UsageError("the engine has no KV cache", "capacity is about the hits of a KV cache")
        self._pool = max(1, self._info.pool_tokens)
        self._bench.unit = self._info.hit_unit
        self._load = self._fitting_load()
        if not has_key(question.spec, "hours"):
            hours = min(hours, hours_of(self._load, self._pool))
        self._bench.hours, self._bench.window = hours, window_of(hours)
        self._contexts = self._pool / prompt_mean(self._load)
        self._following: Callable[[], list[float]] = list
        """The work of the replays that are expected to follow those that run."""
        self._waiting: list[Task] = []
        self._tried: list[Change] = []
        self._chooses, self._at = False, 0
        """The changes that were chosen, whether some will be, and with how many sessions."""
        self._bench.on_report = self._say

    def _fitting_load(self) -> Load:
        """Read the sessions, each up to its first request that the engine cannot take."""
        longest = min(self._info.max_model_len, self._pool)
        given = int(parsed(self._of.spec, 0)[1]["longest"])
        longest = min(longest, given) if given else longest
        self._bench.spec = with_keys(self._of.spec, longest=longest)
        return session_load(self._bench.spec, tokenizer=self._of.tokenizer, sources=self._bench.sources)

    def answer(self) -> Capacity:
        question, bench = self._of, self._bench
        kept = slo = None
        if question.sessions:
            self._replay_all(
                [Task(question.sessions, seed, question.setup) for seed in range(question.seeds)]
            )
            if question.remedies:
                self._replay_all(self._choose(question.sessions))
        else:
            kept = self._searched(question.keep, lambda seed: seed.kept, changes=question.remedies)
        if question.slo and not question.sessions:
            within = self._searched(MET, lambda seed: seed.met or 0.0).range
            slo = Limits(limits=dict(question.slo), met=MET, sessions=within, trusted=self._cost.trusted)
        replicas = None
        if question.fleets is not None:
            self._phase("replaying fleets")
            self._following = list
            replicas = needed(question.fleets, bench, question.setup, question.keep, question.seeds)
        return Capacity(
            model=question.model,
            keep=question.keep,
            hours=bench.hours,
            load=self._load_told,
            engine=msgspec.convert(self._info, EngineTold, from_attributes=True),
            pool=PoolTold(
                blocks=self._info.num_blocks,
                tokens=self._pool,
                bytes=self._info.pool_bytes,
                block_tokens=self._info.block_size,
                assumes=self._info.origins.get("num_blocks", ""),
                contexts=self._contexts,
            ),
            cost=CostTold(
                source=question.cost_source or "plausible",
                by=question.cost_by if question.cost_source else "plausible",
                trusted=bool(question.cost_source) and self._cost.trusted,
                step_ms=self._cost.step_us / 1e3,
                prompt_token_ms=self._cost.prefill_token_us / 1e3,
                decode_ms=self._cost.decode_us / 1e3,
                error_share=self._cost.error_share if self._cost.steps else None,
            ),
            curve=self._points,
            answers=[Answer(keep=question.keep, sessions=kept.range, limit=self._limit(kept))]
            if kept
            else [],
            slo=slo,
            remedies=self._remedies(),
            cannot_say=list(self._unknown(kept)),
            replicas=replicas,
            replays=bench.replays,
            elapsed_s=bench.pace.clock.now() - self._began_s,
        )

    def _searched(self, line: float, share: Callable[[Seed], float], *, changes: bool = False) -> Searches:
        """Replay until the share's number of sessions is found. Replays that were made count.

        `changes`: replay them, too, as soon as the first seed's search has ended: the longest of all is among them.
        """
        most, setup = most_sessions(self._load, self._bench.window), self._of.setup
        searches = Searches(line, most, min(max(LEAST_FIRST, int(self._contexts)), most), self._of.seeds)
        bench, made = self._bench, self._bench.made
        begun: list[Task] = []
        self._chooses = changes

        def take(task: Task) -> None:
            if isinstance(seed := made[task], Seed):
                searches.add(task.seed, task.sessions, share(seed), seed.requests)

        def wanted() -> Task | None:
            if changes and not self._tried and (sessions := searches.crossed(SEED)):
                self._waiting = self._choose(sessions)
            if self._waiting:
                return self._waiting.pop()
            while len(begun) < bench.pace.at_once and (pair := searches.next(further=self._fits(searches))):
                task = Task(*pair, setup)
                if task not in made:
                    begun.append(task)
                    return task
                take(task)
            return None

        def ended(_: Task) -> None:
            """Take replays in the order in which they began, so that the same question has the same replays."""
            while begun and begun[0] in made:
                take(begun.pop(0))

        for task, _ in self._base:
            if task.seed < searches.seeds:
                take(task)
        self._following = lambda: self._expected(searches, self._left(searches))
        bench.run(wanted, ended)
        return searches

    def _replay_all(self, tasks: list[Task]) -> None:
        """Make these replays, the last first."""
        self._waiting = [task for task in tasks if task not in self._bench.made]
        self._following = lambda: [task.work(self._bench.window) for task in reversed(self._waiting)]
        self._bench.run(lambda: self._waiting.pop() if self._waiting else None)

    def _expected(self, searches: Searches, further: int) -> list[float]:
        """Return the work of as many more replays where the searches cross, and of the changes that wait."""
        sessions, waiting = searches.about, self._waiting
        if self._chooses and not self._tried:
            waiting = self._changed(sessions, self._options(sessions))
        works = [task.work(self._bench.window) for task in reversed(waiting)]
        return works + [Task(sessions, SEED, self._of.setup).work(self._bench.window)] * further

    def _fits(self, searches: Searches, further: int = 1) -> bool:
        """Whether as many replays more fit the minute, in which what was made before counts as if it was made now."""
        pace = self._bench.pace
        left_s = pace.left_s(self._expected(searches, further))
        spent_s = pace.clock.now() - self._began_s + pace.saved_s / pace.at_once
        return left_s is not None and spent_s + left_s <= MINUTE_S

    def _left(self, searches: Searches) -> int:
        """Return about how many replays of the search follow: those that fit the minute, and the least in any case."""
        least, most = searches.left(further=False), searches.left(further=True)
        return next((count for count in range(most, least, -1) if self._fits(searches, count)), least)

    def _say(self, least_s: float = EVERY_S) -> None:
        """Say how many replays there are, and for how long as soon as one has told it."""
        bench, now_s = self._bench, self._bench.pace.clock.now()
        if now_s - self._told_s < least_s:
            return
        self._told_s = now_s
        following = self._following()
        left_s = bench.pace.left_s(following)
        parts = [
            f"{bench.replays} made" if bench.replays else "",
            f"{len(bench.running)} running",
            f"about {len(following)} follow" if following else "",
            "" if left_s is None else f"about {left_s:.0f} s left",
        ]
        self._phase(f"replays: {', '.join(filter(None, parts))}")

    def _options(self, sessions: int) -> list[Change]:
        """Return what may be replayed with as many sessions. Without a replay of these: what arithmetic allows."""
        setup, base = self._of.setup, self._bench.parts.get((sessions, SEED))
        twice = any(seed.twice >= TWICE for task, seed in self._base if task.sessions == sessions)

        def why_not(change: Change) -> str:
            if {*change.wins} == {PREEMPTED}:
                return ""
            if base is not None and base.kept >= ALL:
                return "not replayed: every hit that is possible is kept already"
            waiting, flags = 0.0 if base is None else base.waiting, changed_flags(change, setup).keys()
            if waiting < WAITS and flags and flags <= AT_ONCE:
                return f"not replayed: prompts wait in {percent(waiting, digits=0)} of the time"
            return ""

        return [
            replace(change, why_not=change.why_not or why_not(change))
            for change in changes(situation(setup, self._info, sessions=sessions))
            if change.name and (twice or {*change.wins} != {PREEMPTED})
        ]

    def _changed(self, sessions: int, tried: list[Change]) -> list[Task]:
        """Return the replays of changes, the longest last: it begins first, so that no simulator waits for it."""
        tasks = [
            Task(sessions, SEED, change.setup, change.name, change.times)
            for change in tried
            if not change.why_not
        ]
        return sorted(tasks, key=lambda task: task.work(self._bench.window))

    def _choose(self, sessions: int) -> list[Task]:
        self._tried = self._options(sessions)
        self._at = sessions
        return self._changed(sessions, self._tried)

    def _remedies(self) -> list[Remedy]:
        """Return what was chosen, with a replay of a part of the time."""
        sessions = self._at
        made = {task.change: seed for task, seed in self._bench.made.items()}
        remedies = []
        for change in self._tried:
            seed = made.get(change.name)
            remedies.append(
                Remedy(
                    name=change.name,
                    flags=serving(change, self._of.setup),
                    note=change.note,
                    base=Point.of(sessions, [self._bench.parts[sessions, SEED]]),
                    at=Point.of(sessions, [seed]) if isinstance(seed, Seed) else None,
                    why_not=seed.message if isinstance(seed, KvtuneError) else change.why_not,
                    more_memory=change.more_memory and isinstance(seed, Seed),
                )
            )
        return remedies

    @property
    def _base(self) -> list[tuple[Task, Seed]]:
        """The replays of the engine as it is."""
        made = self._bench.made.items()
        return [(task, seed) for task, seed in made if isinstance(seed, Seed) and task.is_plain]

    @property
    def _points(self) -> list[Point]:
        by_sessions: dict[int, list[Seed]] = {}
        for task, seed in self._base:
            by_sessions.setdefault(task.sessions, []).append(seed)
        return [
            Point.of(sessions, sorted(seeds, key=lambda seed: seed.seed))
            for sessions, seeds in sorted(by_sessions.items())
        ]

    def _limit(self, searches: Searches) -> Limit:
        """Say what ends the sessions, by the replays with just more of them."""
        sessions = median(searches.numbers)
        if sessions > searches.most:
            return "none"
        if sessions < 1:
            return "one request"
        points = self._points
        then = next((point for point in points if point.sessions > sessions), points[-1])
        if fmean(seed.waiting for seed in then.seeds) <= FULL:
            return "pool"
        return "max_num_seqs" if sessions >= (self._info.settings.get("max_num_seqs") or 256) else "device"

    def _unknown(self, kept: Searches | None) -> Iterator[CannotSay]:
        hours, longest_s = self._bench.hours, longest_pause_s(self._load)
        if not self._of.cost_source:
            why = "the time of a step is not known: replays take a nominal one"
            step = "--like RUN of `kvtune profile` on that engine, or --cost token=MS,step=MS"
            yield CannotSay(what="where the device is full", why=why, next=step)
        elif not self._cost.trusted:
            why = f"the step cost ({self._of.cost_source}) is not trusted"
            step = "--like RUN of a longer run on a quiet machine"
            yield CannotSay(what="where the device is full, to a session", why=why, next=step)
        if kept is not None and kept.range.high > kept.most:
            yield CannotSay(what="the largest number", why=f"over {kept.most}", next="--sessions N")
        elif kept is not None and len(kept.numbers) < ENOUGH_SEEDS:
            why = f"{len(kept.numbers)} seeds were replayed, and more do not fit a minute"
            yield CannotSay(what="the range to a session", why=why, next=f"--seeds {4 * self._of.seeds}")
        if max(seed.requests for _, seed in self._base) < FEW:
            why = f"no replay measured {FEW} requests"
            yield CannotSay(what="a share to a point", why=why, next="more hours=")
        if hours < longest_s * HOURS_OF_CUT * 0.99:
            why = f"{hours:.3g} hours are short for pauses of up to {longest_s:g} s"
            step = f"hours={longest_s * HOURS_OF_CUT:.3g}, or a lower max_think="
            yield CannotSay(what="turns after the longest pauses", why=why, next=step)
        why, step = (
            "lengths, pauses and answers are those of the load",
            "a log of your own: -w requests:path=LOG",
        )
        yield CannotSay(what="other sessions than these", why=why, next=step)

    @property
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


def window_of(hours: float) -> Window:
    return Window(hours * 3600 * WARM_SHARE, hours * 3600)


def hours_of(load: Load, pool: int) -> float:
    """Return how long a load has to be played, by its pauses, its sessions and the tokens of the pool."""
    turns_s = [load.turn_s(session) for session in load.sessions]
    inside = max(1.0, pool / prompt_mean(load))
    sent_s = REQUESTS / (1 - WARM_SHARE) * fmean(turn for turns in turns_s for turn in turns) / inside
    longest_s = longest_pause_s(load) * HOURS_OF_CUT
    return max(longest_s, min(median(map(sum, turns_s)) * HOURS_OF_SESSION, sent_s / 3600))


def most_sessions(load: Load, window: Window) -> int:
    """Return the most sessions that are looked for, a power of two."""
    requests_s = load.requests / max(1e-9, sum(sum(load.turn_s(session)) for session in load.sessions))
    most = MOST
    while most > LEAST_MOST and most * requests_s * window.end_s > MOST_REQUESTS:
        most //= 2
    return most


def prompt_mean(load: Load) -> float:
    return fmean(node.tokens for session in load.sessions for node in session.nodes)


def longest_pause_s(load: Load) -> float:
    return max(load.pause(node) for session in load.sessions for node in session.nodes)
