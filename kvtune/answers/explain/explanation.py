"""`kvtune explain`: counts every prompt token of a run as a hit or under one cause of miss, and tries remedies.

In the CLI's process. A simulator replays the run with a lookup listener, which gives a verdict on each prompt; their
sums are the explanation. If the replay's hits differ from the run's, the explanation says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from kvtune.answers.changes import Change, Eviction, changed_flags, other_core, situation
from kvtune.answers.explain.remedies import candidates, combined, floor_of
from kvtune.answers.explain.speed import FITTED, Times, like_the_server, speed_words
from kvtune.answers.states.table import States, states_of
from kvtune.base.commands import command, model_word
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.units import count, percent
from kvtune.data.causes import DRAFT, OF_GROUP, OF_TEXT, OF_TIER, REPLAYED
from kvtune.data.run.engines import ranks
from kvtune.data.run.extras import GIVEN, Remedy, Replayed, TextAccount
from kvtune.data.run.types import Run, Table
from kvtune.data.tally import Edges, Tally
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.verdicts.causes import split
from kvtune.lab.sim.verdicts.listener import PromptVerdict
from kvtune.lab.sim.verdicts.observer import verdicts_of
from kvtune.lab.sim.worker import Report
from kvtune.plugin.vllm.names import speculation_reads
from kvtune.reading.analysis.again import Invocation, left_out, of_run, remedied, with_flags
from kvtune.reading.analysis.cache import prefix_cache
from kvtune.reading.analysis.rebuild import rebuilt
from kvtune.reading.analysis.replayed import CORES, WORTH_SHARE, helping, needs, preempts, ranked
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.verdict import OF_THE_CACHE
from kvtune.requests.loads.sources import Sources
from kvtune.requests.types import Workload

Counts = dict[str, int]

LOOKAHEAD = (
    "not replayed: from 0.33 on, vLLM's block hashes look ahead for EAGLE and MTP, and no block is dropped; the "
    "installed vLLM's do not"
)


class Disagreement(msgspec.Struct, frozen=True):
    """A request whose hit tokens differ between the run and the replay."""

    request: str
    run_hit_tokens: int
    replayed_hit_tokens: int


MOST_DISAGREEMENTS = 100
"""The most requests that an explanation names as differing."""


class PrefixCache(Tally, frozen=True, kw_only=True):
    """The fields are those of a run's summary."""

    hit_rate: float


class Tried(Remedy, frozen=True, kw_only=True):
    """A remedy that was replayed: what serves it, and the commands that measure and serve it."""

    needs: str
    command: str
    serve: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvtune explain` and `explain-log` answer: their `--json`.

    `by_class`: request class -> tokens of query, hit and each cause. `by_group`: KV cache group -> cause -> tokens.
    `tier_hit_tokens`: hits that came from a tier of host memory. `other`: the replay with the other core.
    `untried`: settings that may help and were not replayed, as `tries` was too small. `computed_twice`: tokens that the
    replay computed twice after preemptions, by request and cause. `agreed`: the misses of the requests that hit as many
    tokens in the run as in the replay, by cause. `disagreements`: the first of the `differing_requests`; the replay hit
    nothing in `cold_replays` of these. `gap_tokens`: the replay's hits minus the run's; 0 if the run recorded none.
    `speed`: how fast a recorded server was replayed, in words. `of`: what was replayed, a "run" or a "log". `texts`:
    what mending a log's text brings. `states`: what flags keep of recurrent states, where that is at fault.
    """

    schema: int = 1
    prefix_cache: PrefixCache
    by_class: dict[str, Counts]
    by_group: dict[str, Counts]
    evictions: tuple[Eviction, ...]
    requests: int
    not_admitted: int
    run_hit_tokens: int | None
    gap_tokens: int
    disagreements: tuple[Disagreement, ...]
    differing_requests: int
    cold_replays: int
    other: Tried | None = None
    remedies: tuple[Tried, ...] = ()
    notes: tuple[str, ...] = ()
    tier_hit_tokens: int = 0
    preemptions: int = 0
    computed_twice: dict[str, Counts] = {}
    agreed: Counts = {}
    untried: int = 0
    speed: str = ""
    of: str = "run"
    texts: TextAccount | None = None
    states: States | None = None

    @property
    def replayed(self) -> Replayed:
        """The part of the explanation that a run file keeps (`header.extra.replayed`)."""
        return Replayed(
            requests=self.requests,
            query_tokens=self.prefix_cache.query_tokens,
            hit_tokens=self.prefix_cache.hit_tokens,
            preemptions=self.preemptions,
            other=None if self.other is None else _stored(self.other),
            remedies=list(map(_stored, self.remedies)),
            untried=self.untried,
            gap_tokens=self.gap_tokens,
        )


def _stored(tried: Tried) -> Remedy:
    return Remedy(**{name: getattr(tried, name) for name in Remedy.__struct_fields__})


@contextmanager
def bench_of(
    run: Run,
    *,
    view: View | None = None,
    trace: Path | None = None,
    model: str = "",
    trusted: bool = False,
    tokenizer: str = "",
    sources: Sources | None = None,
    texts: Sequence[Edges] | None = None,
    lab: Lab = LAB,
) -> Iterator[Bench]:
    """Yield what replays a run; a server's at the server's speed.

    `view` shows progress. `trace`: the run's trace, if its workload was one. `model`: the model that the user named.
    `trusted`: the user vouches for the run file (lab/setup/like.py). `tokenizer` renders a log, which `sources` read.
    `texts`: see `Bench`.
    """
    _one_life(run, trace, model)
    setup = Setup.of_run(run, model=model, trusted=trusted)
    workload = rebuilt(run, trace, tokenizer, sources)
    if not sent_requests(run).any():
        raise UsageError("the run ended before a request was sent: no prompt to explain", "record it again")
    with lab.simulators() as simulators:
        bench = Bench(simulators, run, view or View(), setup.with_load(workload), model, texts)
        if run.header.source == "server":
            bench = bench.as_fast_as(Times.of(run.table("requests"), run.table("server")))
        yield bench


def _one_life(run: Run, trace: Path | None, model: str) -> None:
    """UsageError if a replay has another cache than was recorded: several servers', or one's that was restarted."""
    server, info = run.header.extra.server, run.header.workload
    if server is not None and server.fleet is not None:
        load = f"requests:path={trace or info.params.get('path', 'LOG')}"
        words = [
            "profile",
            model_word(model or run.header.model),
            "--on",
            "sim",
            "--core",
            "stock",
            "-w",
            load,
        ]
        raise UsageError(
            f"the recording is of {len(server.fleet.servers)} servers, and explain replays one",
            "as the log routed it, and otherwise: " + with_flags(words, run.header.engine.args),
        )
    if server is None or not server.parts:
        return
    since = info.params.get("since")
    begun = since if isinstance(since, float) else 0.0
    log = trace or info.params.get("path", "LOG")
    parts = [
        command(
            "explain",
            "-w",
            f"requests:path={log},since={begun + part.begin_s:.3f},until={begun + part.end_s:.3f}",
        )
        for part in server.parts
    ]
    raise UsageError(
        f"the server restarted {server.restarts} x while it was recorded, and a replay has one engine",
        f"replay the parts: {'; '.join(parts)}",
    )


def explained(bench: Bench, tries: int) -> Explanation:
    run, view = bench.run, bench.view
    view.phase(f"replaying {count(int(sent_requests(run).sum()))} requests")
    listening = bench.setup.replayed(verdicts=True)
    other = bench.other_core()
    replayed, *others = bench.outcomes([listening, other.setup] if tries else [listening])
    if isinstance(replayed, KvtuneError):
        raise replayed
    explanation = structs.replace(add_up(run, replayed, bench.texts), speed=bench.speed, of=bench.of)
    engine, cache = replayed.header.engine, explanation.prefix_cache
    notes = [floor_of(engine, replayed.header.core.parts.get("packed", False)), *explanation.notes]
    if cache.misses["eagle_drop"] and not speculation_reads("disable_lookahead_block_hashes"):
        notes.append(LOOKAHEAD)
    if not tries:
        return structs.replace(explanation, notes=tuple(filter(None, notes)))
    stands_in = bench.setup.model not in (run.header.model, bench.model)
    here = situation(
        bench.setup,
        engine,
        ran_on="" if stands_in else run.header.engine.device,
        evictions=explanation.evictions,
        tokens_s=_written(replayed, explanation) / max(replayed.header.wall_s, 1e-9),
        stands_in=stands_in,
        load=bench.setup.load.built(),
    )
    preempted = preempts(explanation.preemptions, explanation.requests)
    every = candidates(cache.misses, cache.query_tokens, here, preempted=preempted)
    # Of options with equal gains the cheaper one is listed first.
    options = sorted(every[:tries], key=lambda option: option.place)
    explanation = structs.replace(
        explanation,
        other=bench.remedy(other, others[0], cache.hit_tokens),
        untried=len(every) - len(options),
    )
    remedies: list[Tried] = []
    for batch in filter(None, (options, combined(options, here))):
        view.phase(f"replaying {len(batch)} remedies")
        outcomes = bench.outcomes(option.setup for option in batch)
        remedies += [
            bench.remedy(option, outcome, cache.hit_tokens)
            for option, outcome in zip(batch, outcomes, strict=True)
        ]
        explanation = structs.replace(explanation, remedies=tuple(ranked(remedies)))
        if helping(explanation.replayed):
            break
    if helping(explanation.replayed):
        notes.append(left_out(bench.set_up.flags))
    states = None
    if here.states and states_at_fault(cache):
        view.phase("replaying what flags keep of states")
        states = states_of(bench.setup, bench.setup.load.built(), bench.outcomes, stands_in=stands_in)
    return structs.replace(explanation, states=states, notes=tuple(filter(None, notes)))


def states_at_fault(cache: PrefixCache) -> bool:
    """Whether what is kept of states costs a share of the prompt tokens that is worth a remedy."""
    lost = sum(cache.misses[cause] for cause in ("not_retained", "eagle_drop", "partial_block"))
    return lost >= WORTH_SHARE * cache.query_tokens


def _written(replayed: Run, explanation: Explanation) -> int:
    """Return the tokens that the replay wrote to the cache: prompts that missed, and answers."""
    return explanation.prefix_cache.missed + int(replayed.table("requests")["output_tokens"].sum())


def with_other_core(bench: Bench) -> Replayed:
    """Replay the run once with the other core, to show that core's hits beside the run's own."""
    run = bench.run
    requests, measured = run.table("requests"), measured_requests(run)
    hits = _run_hits(requests, measured) or 0
    option = bench.other_core()
    bench.view.phase(f"replaying it with {CORES[option.setup.core]}")
    (outcome,) = bench.outcomes([option.setup])
    return Replayed(
        requests=int(measured.sum()),
        query_tokens=int(requests["prompt_tokens"][measured].sum()),
        hit_tokens=hits,
        preemptions=int(requests["preemptions"][measured].sum()),
        other=_stored(bench.remedy(option, outcome, hits)),
    )


@dataclass(frozen=True)
class Bench:
    """Replays a run with other settings. `setup`: the run's, with its load. `model`: the model that the user named.

    `texts`: what earlier prompts of the log had of each request's; None: not known.
    `speed`: how the replays' step cost was found, in words. `of`: what is replayed, a "run" or a "log".
    """

    simulators: Simulators
    run: Run
    view: View
    setup: Setup
    model: str = ""
    texts: Sequence[Edges] | None = None
    speed: str = ""
    of: str = "run"

    def as_fast_as(self, times: Times, workload: Workload | None = None) -> Bench:
        """Return the bench with the step cost with which replayed requests take as long as `times` says.

        `workload`: the requests as they were sent, if the bench's load sends them at other times.
        """
        self.view.phase("fitting the step cost to the requests' times")
        first = (self.setup.simulated.requests or list(range(len(times.total_s))))[:FITTED]

        def replay(setup: Setup) -> Run:
            setup = setup.replayed(requests=first)
            return self.replay(setup.with_load(workload) if workload is not None else setup)

        setup = like_the_server(self.setup, times, replay, self.run.header.started_at)
        return replace(self, setup=setup, speed=speed_words(setup.simulated.cost, times))

    @property
    def set_up(self) -> Invocation:
        """The run's set-up, with the model that the user named."""
        invocation = of_run(self.run)
        return replace(invocation, model=self.model) if self.model else invocation

    def outcomes(self, setups: Iterable[Setup]) -> list[Run | KvtuneError]:
        """Replay the set-ups, on as many engines as the run had."""
        routed = (as_routed(self.run, setup) for setup in setups)
        return self.simulators.outcomes(routed, self.view.progress)

    def replay(self, setup: Setup) -> Run:
        return self.simulators.replay(as_routed(self.run, setup), self.view.progress)

    def other_core(self) -> Change:
        return next(other_core(situation(self.setup, self.run.header.engine)))

    def remedy(self, option: Change, outcome: Run | KvtuneError, before_tokens: int) -> Tried:
        device, figures = self.run.header.engine.device, dict[str, Any]()
        if isinstance(outcome, KvtuneError):
            figures = {"error": outcome.message}
        else:
            device, requests = outcome.header.engine.device, outcome.table("requests")
            hits = _run_hits(requests, measured_requests(self.run)) or 0
            figures = {"hit_tokens": hits, "gain_tokens": hits - before_tokens}
            figures["preemptions"] = int(requests["preemptions"].sum())
        remedy = Remedy(
            change=option.change,
            cause=option.cause,
            cost=option.cost,
            core=option.setup.core,
            core_settings=option.setup.core_settings,
            flags=changed_flags(option, self.setup),
            **figures,
        )
        invocation = remedied(self.set_up, remedy)
        return Tried(
            **structs.asdict(remedy),
            needs=needs(remedy),
            command=invocation.line("profile"),
            serve=invocation.serve(device),
        )


def measured_requests(run: Run) -> NDArray[np.bool_]:
    """Return a mask of the sent requests whose hits the run recorded, or of all sent ones if it recorded no hits."""
    sent, counted = sent_requests(run), run.table("requests")["hit_tokens"] >= 0
    return sent & counted if counted.any() else sent


def add_up(run: Run, replayed: Run, texts: Sequence[Edges] | None = None) -> Explanation:
    """Sum up a replay's verdicts: each token of every measured request is a hit or has exactly one cause.

    `texts` (see `Bench`) divide what was never seen.
    """
    verdicts = verdicts_of(replayed)
    table, sent, measured = run.table("requests"), sent_requests(run), measured_requests(run)
    causes = REPLAYED if texts is None else (*REPLAYED, *OF_TEXT)
    by_class: dict[str, list[Tally]] = defaultdict(list)
    agreed: list[Tally] = []
    by_group: dict[str, Counts] = defaultdict(lambda: dict.fromkeys(OF_GROUP, 0))
    lost: dict[str, list[tuple[int, float]]] = defaultdict(list)
    tier_hit = not_admitted = 0
    of_tier = replayed.table("requests")["tier_hit_tokens"]
    of_run, of_replay = table["hit_tokens"], replayed.table("requests")["hit_tokens"]
    for index, verdict in enumerate(verdicts):
        if not sent[index]:
            continue
        if verdict is None or not measured[index]:
            not_admitted += 1
            continue
        tally = split(verdict.boundaries, texts[index] if texts is not None else None)
        counts = tally.misses
        tier_hit += int(of_tier[index])
        by_class[class_of(str(table["kind"][index]), int(table["round"][index]))].append(tally)
        if of_run[index] in (-1, of_replay[index]):
            agreed.append(tally)
        _count_by_group(verdict, counts, by_group)
        if verdict.boundaries.evicted_for_draft and verdict.evicted is not None:
            lost[f"{_evicted_by(verdict, table)}, for the draft model"].append((counts[DRAFT], _age(verdict)))
        if evicted := counts["evicted"] + (0 if verdict.evicted is None else sum(counts[c] for c in OF_TIER)):
            lost[_evicted_by(verdict, table)].append((evicted, _age(verdict)))
    ran, admitted = _run_hits(table, measured), [tally for tallies in by_class.values() for tally in tallies]
    whole = Tally.sum(admitted, causes)
    differing = [
        Disagreement(str(table["id"][index]), int(of_run[index]), int(of_replay[index]))
        for index in np.flatnonzero((of_run >= 0) & (of_replay >= 0) & (of_run != of_replay))
    ]
    return Explanation(
        prefix_cache=PrefixCache(**structs.asdict(whole), hit_rate=whole.rate or 0.0),
        by_class={label: _counts(Tally.sum(tallies, causes)) for label, tallies in by_class.items()},
        by_group=dict(by_group),
        evictions=_evictions(lost),
        requests=len(admitted),
        not_admitted=not_admitted,
        run_hit_tokens=ran,
        gap_tokens=0 if ran is None else whole.hit_tokens - ran,
        disagreements=tuple(differing[:MOST_DISAGREEMENTS]),
        differing_requests=len(differing),
        cold_replays=sum(each.replayed_hit_tokens == 0 for each in differing),
        notes=_notes(run, replayed),
        tier_hit_tokens=tier_hit,
        preemptions=int(table["preemptions"][measured].sum()),
        computed_twice={
            str(table["id"][int(row)]): dict(causes)
            for row, causes in replayed.header.extra.computed_twice.items()
        },
        agreed=Tally.sum(agreed, causes).misses,
    )


def _counts(tally: Tally) -> Counts:
    return {"query": tally.query_tokens, "hit": tally.hit_tokens, **tally.misses}


def class_of(kind: str, round_: int) -> str:
    """Return a request's class in words: its kind, and its round (counted from 1) if the workload has rounds."""
    words = ([kind] if kind else []) + ([f"visit {round_ + 1}"] if round_ >= 0 else [])
    return ", ".join(words) or "all"


def _count_by_group(verdict: PromptVerdict, counts: Counts, by_group: dict[str, Counts]) -> None:
    for cause in OF_GROUP:
        group = verdict.unkept if cause == "not_retained" else verdict.lagging
        if counts[cause] and group:
            by_group[group][cause] += counts[cause]


def _evicted_by(verdict: PromptVerdict, table: Table) -> str:
    """Return the phase and class of the request that took the blocks, in words."""
    fate = verdict.evicted
    if fate is None or not fate.by:
        return "unknown"
    if fate.phase == "overwritten":
        return "overwritten by its own request"
    row = int(fate.by)
    return f"{fate.phase} of {class_of(str(table['kind'][row]), int(table['round'][row]))}"


def _age(verdict: PromptVerdict) -> float:
    return verdict.at_s - verdict.evicted.at_s if verdict.evicted is not None else float("nan")


def _evictions(lost: dict[str, list[tuple[int, float]]]) -> tuple[Eviction, ...]:
    evictions = []
    for pressure, entries in lost.items():
        ages = np.array([age for _, age in entries if age == age])
        median, longest = (float(np.median(ages)), float(ages.max())) if len(ages) else (float("nan"),) * 2
        evictions.append(Eviction(pressure, sum(tokens for tokens, _ in entries), median, longest))
    return tuple(sorted(evictions, key=lambda eviction: -eviction.tokens))


def _run_hits(table: Table, measured: NDArray[np.bool_]) -> int | None:
    counted = table["hit_tokens"][measured & (table["hit_tokens"] >= 0)]
    return int(counted.sum()) if len(counted) else None


def _notes(run: Run, replayed: Run) -> tuple[str, ...]:
    return tuple(
        f"the {name} is {either.header.state}: {either.header.why}"
        for name, either in (("run", run), ("replay", replayed))
        if either.header.state != "complete"
    )


def with_misses(run: Run, explanation: Explanation) -> Run:
    """Return the run with its causes in `header.extra.misses`.

    Misses of requests whose hits differ in the replay are `replay_differs`. KvtuneError if these are most of the run's
    misses, or if the replay sent other requests. Causes that a server's events told are kept.
    """
    if run.header.source == "server" and run.header.extra.misses:
        return run
    of_run = prefix_cache(run, None)
    missed = of_run.missed
    agreed = explanation.agreed
    unknown = missed - sum(agreed.values())
    if of_run.query_tokens < explanation.prefix_cache.query_tokens or not 0 <= unknown <= missed / 2:
        raise KvtuneError(
            f"the causes are not stored: the replay differs from the run in {explanation.differing_requests} requests, "
            f"which have {percent(max(0, unknown), missed)} of its misses",
            "they explain the replay, not the run; --json prints them",
        )
    return run.with_extra(misses=agreed | ({"replay_differs": unknown} if unknown else {}))


def advised(simulators: Simulators, analysis: RunAnalysis, workload: Workload, tries: int, view: View) -> Run:
    """Return the run with its replays, or the reason why they failed, in `header.extra.replayed`.

    If the cache limits the run, also add the exact causes of its misses. `tries` as for `explain`.
    """
    run = analysis.run
    if run.header.state != "complete" or not len(run.table("requests")["id"]):
        return run.with_extra(replayed=Replayed(why=f"the run is {run.header.state}"))
    try:
        setup = Setup.of_run(run, model=run.header.model, trusted=True)
        bench = Bench(simulators, run, view, setup.with_load(workload), run.header.model)
        if not set(analysis.verdict.limits) & set(OF_THE_CACHE):
            return run.with_extra(replayed=with_other_core(bench))
        explanation = explained(bench, tries)
    except KvtuneError as error:
        return run.with_extra(replayed=Replayed(why=error.message))
    run = run.with_extra(replayed=explanation.replayed)
    with suppress(KvtuneError):  # the replay's hits differ from the run's: so may the causes
        run = with_misses(run, explanation)
    return run


class View:
    """Receives the progress of an explanation. Does nothing; subclasses show it."""

    def phase(self, text: str) -> None: ...

    def progress(self, report: Report) -> None: ...


def sent_requests(run: Run) -> NDArray[np.bool_]:
    """Return a mask of the workload's requests that were sent: a run that ended early sent only some."""
    return np.isfinite(run.table("requests")["sent_s"])


def as_routed(run: Run, setup: Setup) -> Setup:
    """Return the set-up with as many engines as the run had, each of which gets the requests that it served."""
    numbers = ranks(run)
    if len(numbers) == 1:
        return setup
    routed = run.table("requests")["engine"].tolist()
    return setup.replayed(replicas=max(numbers) + 1, router=GIVEN, routed=routed)
