"""What `kvtune capacity` says of its answer: a headline, then the curve, what moves it, and what cannot be said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from kvtune.answers.capacity.result import Capacity, Limits, Point, Range, Remedy, Replicas
from kvtune.base.units import count, percent, size, span
from kvtune.data.causes import CAUSES
from kvtune.data.run.signature import identity
from kvtune.data.show.charts import columns, spec_of
from kvtune.data.show.parts import Banner, Chart, Document, Section, grid
from kvtune.data.show.terminal import Column

MOVED = 0.02
"""A change that keeps this much more of the hits stands in the headline."""
LIMITS = {
    "pool": "the pool",
    "device": "the device",
    "max_num_seqs": "max_num_seqs",
    "one request": "the pool holds not even one session",
    "none": "nothing up to there",
}
CURVE = (
    Column("sessions"),
    Column("hits kept"),
    Column("hit rate", rank=1),
    Column("computed per output token", rank=4),
    Column("computed twice", rank=3),
    Column("pool held, most", rank=3),
    Column("prompts wait", rank=2),
    Column("p50 first token", rank=2),
    Column("turns a minute", rank=2),
    Column("within limits", rank=1),
    Column("by"),
)
REMEDIES = (
    Column("what moves it"),
    Column("hits kept"),
    Column("note", right=False, folds=True, rank=2, least=30),
)
NOT_TRUSTED = Banner(
    "warn",
    "Where the device is full is not known to a session",
    "Times and what is marked * are of step costs that are not known or not trusted. How many sessions keep their hits "
    "hardly depends on them.",
)
UNKNOWN = tuple(Column(head, right=False, folds=True, least=24) for head in ("what", "why", "what to do"))


def document(capacity: Capacity) -> Document:
    return Document(
        name="kvtune capacity",
        subject=capacity.model,
        headline=headline(capacity),
        sections=tuple(_sections(capacity)),
        identity=identity(
            "capacity",
            *(capacity.model, capacity.load.workload, capacity.keep, capacity.hours, capacity.pool.blocks),
        ),
        title=f"{capacity.model} · sessions · kvtune",
        banners=() if capacity.cost.trusted else (NOT_TRUSTED,),
        closing=f"{capacity.replays} replays, {capacity.elapsed_s:.0f} s",
    )


def headline(capacity: Capacity) -> str:
    """Return the answer in one sentence."""
    kept = f"hits stay above {100 * capacity.keep:g} % of what is possible"
    clauses = [
        f"{_sessions(answer.sessions)} at once ({kept}; {_seeds(answer.sessions)})"
        for answer in capacity.answers
    ]
    if not clauses:
        (point,) = capacity.curve
        clauses = [f"{point.sessions:,} sessions keep {_kept(point)} of the hits that are possible"]
    if capacity.slo is not None:
        slo = capacity.slo
        clauses.append(f"within {_limits(slo)} {_range(slo.sessions)}{_mark(slo.trusted)}")
    if capacity.replicas is not None and capacity.replicas.by_seed:
        clauses.append(fewest(capacity.replicas))
    best = max((remedy for remedy in capacity.remedies if not remedy.more_memory), key=_gain, default=None)
    if best is not None and best.base is not None and best.at is not None and _gain(best) >= MOVED:
        clauses.append(
            f"{best.base.sessions:,} keep {_kept(best.at)} with {best.name}, {_kept(best.base)} without"
        )
    return "; ".join(clauses)


def _gain(remedy: Remedy) -> float:
    return (
        remedy.at.kept.mean - remedy.base.kept.mean
        if remedy.at is not None and remedy.base is not None
        else 0.0
    )


def _sections(capacity: Capacity) -> Iterator[Section]:
    yield Section(
        "curve",
        "How many sessions fit",
        facts=tuple(given(capacity)),
        tables=(grid(CURVE, [point_row(point, capacity) for point in capacity.curve], "Exact replays"),),
        notes=(*_answers(capacity), *preempted(capacity)),
        draw=lambda: [_chart(capacity)],
    )
    if capacity.remedies:
        rows = [(*remedy_row(remedy), said_of(remedy)) for remedy in capacity.remedies]
        base = next(remedy.base for remedy in capacity.remedies if remedy.base is not None)
        lead = (
            f"Each was replayed with {base.sessions:,} session{'s'[: base.sessions > 1]}, with one seed and a quarter "
            "of the time, and so was the engine as it is."
        )
        yield Section("remedies", "What moves it", lead=lead, tables=(grid(REMEDIES, rows),))
    if capacity.replicas is not None:
        lead, *numbers = shared(capacity.replicas)
        yield Section("replicas", "How many replicas this load needs", lead=f"{lead}.", notes=tuple(numbers))
    if capacity.cannot_say:
        unknown = [(each.what, each.why, each.next) for each in capacity.cannot_say]
        yield Section("unknown", "What cannot be said", tables=(grid(UNKNOWN, unknown),))


def given(capacity: Capacity) -> Iterator[tuple[str, str]]:
    """Yield what was asked about: the load, the pool, the step cost."""
    load, pool, cost = capacity.load, capacity.pool, capacity.cost
    yield (
        "load",
        f"{load.sessions:,} sessions ({count(load.requests)} requests, mean prompt {count(load.prompt_mean)} tokens; "
        f"pauses median {load.think_p50:.3g} s, p90 {load.think_p90:.3g} s, cut at {load.cut:g} s: "
        f"{percent(load.cut_turns)} of turns), {capacity.hours:g} hours, measured after a third",
    )
    memory = f" ({size(pool.bytes)})" if pool.bytes else ""
    assumes = f" ({pool.assumes})" if pool.assumes else ""
    yield (
        "pool",
        f"{pool.blocks:,} blocks = {count(pool.tokens)} tokens{memory}: {pool.contexts:.1f} mean prompts{assumes}",
    )
    if cost.source == "plausible":
        times = "not known*: replays take nominal ones"
    else:
        times = f"{cost.step_ms:.3g} ms + {cost.prompt_token_ms:.3g} ms a prompt token"
        times += f" + {cost.decode_ms:.3g} ms a decode" if cost.decode_ms else ""
        trust = "trusted" if cost.trusted else "NOT trusted*"
        times += f", {trust} ({cost.source})"
    yield "step cost", times
    if load.left_out_requests:
        yield (
            "left out",
            f"{load.left_out_requests:,} requests of sessions that grow too long for this engine",
        )
    for note in load.notes:
        yield "note", note


def point_row(point: Point, capacity: Capacity) -> list[str]:
    """Return the cells of CURVE; a dash for what was not asked for."""
    within = [seed.met for seed in point.seeds if seed.met is not None]
    sign = _mark(capacity.cost.trusted)
    return [
        f"{point.sessions:,}",
        _kept(point),
        _share([seed.hit_rate for seed in point.seeds]),
        _spread([seed.computed_per_output for seed in point.seeds]),
        _twice(point) if _was_preempted(point) else "–",
        percent(max(seed.pool_most or 0.0 for seed in point.seeds), digits=0),
        f"{_share([seed.waiting for seed in point.seeds])}{sign}",
        f"{median(seed.ttft_p50_s for seed in point.seeds):.2f} s{sign}",
        f"{_spread([seed.turns_a_minute for seed in point.seeds])}{sign}",
        f"{_share(within)}{sign}" if within else "–",
        f"{len(point.seeds)} replay{'s'[: len(point.seeds) > 1]}",
    ]


def _answers(capacity: Capacity) -> Iterator[str]:
    for answer in capacity.answers:
        share = f"{100 * answer.keep:g} % of an infinite cache's hits"
        yield f"{share}: {_sessions(answer.sessions)}; the limit is {LIMITS[answer.limit]}."
    if capacity.slo is not None:
        slo = capacity.slo
        share = f"{100 * slo.met:g} % of the requests within {_limits(slo)}"
        yield f"{share}: {_sessions(slo.sessions)}{_mark(slo.trusted)}."
    for numbers in [answer.sessions for answer in capacity.answers][:1]:
        if numbers.low < numbers.high:
            by_seed = ", ".join(f"{number:,}" for number in numbers.by_seed)
            yield (
                f"With {numbers.low:,} sessions 99 % of other seeds are expected to keep the hits, with "
                f"{numbers.high:,} sessions 1 %. Those that were replayed keep them with {by_seed}."
            )


def remedy_row(remedy: Remedy) -> tuple[str, str]:
    """Return a remedy's name, and the hits that are kept without and with it."""
    if remedy.at is None or remedy.base is None:
        return remedy.name, "no change" if remedy.why_not else "–"
    return remedy.name, f"{_kept(remedy.base)} -> {_kept(remedy.at)} at {remedy.at.sessions}"


def said_of(remedy: Remedy) -> str:
    """Return what stands beside a remedy: why it was not tried, its price, what it does against preemptions."""
    twice = ""
    if remedy.base is not None and remedy.at is not None and _twice(remedy.base) != _twice(remedy.at):
        twice = f"computed twice {_twice(remedy.base)} -> {_twice(remedy.at)} of all tokens"
    return remedy.why_not or "; ".join(filter(None, (remedy.note, twice)))


def preempted(capacity: Capacity) -> Iterator[str]:
    """Yield what preemptions cost at each replayed number of sessions."""
    points = [point for point in capacity.curve if _was_preempted(point)]
    for point in points:
        causes: dict[str, float] = {}
        for seed in point.seeds:
            for cause, tokens in (seed.computed_twice or {}).items():
                causes[cause] = causes.get(cause, 0.0) + tokens / len(point.seeds)
        requests = _spread([float(seed.preempted or 0) for seed in point.seeds])
        by_cause = ", ".join(f"{CAUSES[cause].title} {count(tokens)}" for cause, tokens in causes.items())
        yield (
            f"{point.sessions:,} sessions: {requests} requests were preempted; tokens computed twice, mean of the "
            f"seeds: {count(sum(causes.values()))}, {_twice(point)} of all{f' ({by_cause})' if by_cause else ''}."
        )
    if not points:
        yield "No replay preempted a request: no token was computed twice."


def fewest(replicas: Replicas) -> str:
    """Return how many engines the load needs, in words."""
    load = f"{replicas.sessions} sessions need" if replicas.sessions else "this load as it is needs"
    numbers = [number or replicas.most + 1 for number in replicas.by_seed]
    needed = Range(low=min(numbers), high=max(numbers), by_seed=numbers, most=replicas.most)
    return f"{load} {_range(needed)} replica{'s'[: needed.high > 1]} ({replicas.router})"


def shared(replicas: Replicas) -> Iterator[str]:
    """Yield how many engines the load needs, and what each number of them keeps."""
    if replicas.why_not:
        yield f"How many replicas was not replayed: {replicas.why_not}"
        return
    yield f"{fewest(replicas)}, by exact replays; an infinite cache is 100 %"
    for number in sorted({point.replicas for point in replicas.tried}):
        points = [point for point in replicas.tried if point.replicas == number]
        enough = sum(point.enough for point in points)
        partly = "enough with some seeds" if enough else "not enough"
        verdict = "enough" if enough == len(points) else partly
        limits = [point.met for point in points if point.met is not None]
        within = f", {_share(limits)} of the requests within limits" if limits else ""
        uneven = [point.balance for point in points if point.balance is not None and number > 1]
        busiest = f", the busiest computes {max(uneven):.2f}x the mean" if uneven else ""
        yield f"{number}: {_share([point.kept for point in points])} of the hits kept{within}{busiest}: {verdict}"


def _was_preempted(point: Point) -> bool:
    return any(seed.preempted for seed in point.seeds)


def _twice(point: Point) -> str:
    return _share([seed.twice for seed in point.seeds], digits=1)


def _kept(point: Point) -> str:
    return _share([seed.kept for seed in point.seeds])


def _limits(limits: Limits) -> str:
    return ",".join(f"{name}={most:g}" for name, most in limits.limits.items())


def _mark(trusted: bool) -> str:
    return "" if trusted else "*"


def _seeds(numbers: Range) -> str:
    return f"{len(numbers.by_seed)} seed{'s'[: len(numbers.by_seed) > 1]}"


def _sessions(numbers: Range) -> str:
    return f"{_range(numbers)} session{'' if numbers.high == 1 else 's'}"


def _range(numbers: Range) -> str:
    ends = (numbers.low, numbers.high)
    return span(*(f"over {numbers.most}" if end > numbers.most else f"{end:,}" for end in ends))


def _share(values: Sequence[float], digits: int = 0) -> str:
    low, high = (f"{100 * value:.{digits}f}" for value in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low}–{high} %"


def _spread(values: Sequence[float]) -> str:
    low, high = (f"{value:.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def _chart(capacity: Capacity) -> Chart:
    """Draw the share of the hits that each replay keeps, and where the answer ends."""
    import altair as alt

    points, last = capacity.curve, capacity.curve[-1].sessions
    kept = columns(
        sessions=[point.sessions for point in points],
        kept=[100 * point.kept.mean for point in points],
        low=[100 * point.kept.low for point in points],
        high=[100 * point.kept.high for point in points],
    )
    ends = columns(
        start=[answer.sessions.low - 0.5 for answer in capacity.answers],
        stop=[min(answer.sessions.high, last) + 0.5 for answer in capacity.answers],
        what=[f"ends by {LIMITS[answer.limit]}" for answer in capacity.answers],
    )
    base = alt.Chart(alt.NamedData(name="kept"), height=260)
    scale = alt.Scale(domain=[0, last + 1])
    across = alt.X("sessions:Q", title="sessions at once", scale=scale, axis=alt.Axis(format="d"))
    share = alt.Y("kept:Q", title="hits kept (%)", scale=alt.Scale(domain=[0, 100]))
    color = alt.value("var(--c-hit)")
    tips = [
        alt.Tooltip("sessions:Q", title="sessions"),
        alt.Tooltip("kept:Q", title="hits kept (%)", format=".1f"),
    ]
    drawing = alt.layer(
        alt.Chart(alt.NamedData(name="ends"))
        .mark_rect(opacity=0.12)
        .encode(
            x=alt.X("start:Q", title="sessions at once"),
            x2="stop:Q",
            tooltip=[alt.Tooltip("what:N", title=" ")],
        ),
        base.mark_line().encode(x=across, y=share, color=color),
        base.mark_rule().encode(x=across, y=alt.Y("low:Q", title="hits kept (%)"), y2="high:Q", color=color),
        base.mark_point(filled=True, size=50).encode(x=across, y=share, color=color, tooltip=tips),
    )
    rows = [(p.sessions, *map(percent, (p.kept.mean, p.kept.low, p.kept.high)), len(p.seeds)) for p in points]
    return Chart(
        "kept",
        "Hits that are kept, of what is possible",
        headline(capacity),
        spec_of(drawing),
        grid(
            ("sessions", "hits kept", "lowest seed", "highest seed", "replays"),
            rows,
            "Share of an infinite cache's hits",
        ),
        {"kept": kept, "ends": ends},
        "Points are exact replays, upright lines the range over seeds. Shaded: where the answer ends.",
    )
