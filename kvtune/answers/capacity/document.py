"""What `kvtune capacity` says of its answer: a headline, then the curve, what moves it, and what cannot be said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median

from kvtune.answers.capacity.result import Answer, Capacity, Collapse, Limits, Point, Range, Remedy, Replicas
from kvtune.base.units import count, percent, size
from kvtune.data.causes import CAUSES
from kvtune.data.run.signature import identity
from kvtune.data.show.charts import columns, spec_of
from kvtune.data.show.parts import Banner, Chart, Document, Section, grid
from kvtune.data.show.terminal import Column

MOVED = 2
"""A remedy whose mean number of sessions is this much higher stands in the headline."""
LIMITS = {
    "pool": "the pool",
    "device": "the device",
    "max_num_seqs": "max_num_seqs",
    "one request": "the pool holds not even one session",
    "none": "nothing up to there",
}
REPLAY, ESTIMATE = "exact replays", "estimates"
CURVE = (
    Column("sessions"),
    Column("hits kept"),
    Column("hit rate", rank=1),
    Column("computed per output token", rank=4),
    Column("computed twice", rank=3),
    Column("pool held, most", rank=3),
    Column("p50 first token", rank=2),
    Column("turns a minute", rank=2),
    Column("within limits", rank=1),
    Column("by"),
)
REMEDIES = (
    Column("what moves it"),
    Column("hits kept"),
    Column("sessions"),
    Column("full from", rank=1),
    Column("note", right=False, folds=True, rank=2, least=30),
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
        banners=_banners(capacity),
        closing=f"{capacity.replays} replays, {capacity.estimates:,} estimates, {capacity.elapsed_s:.0f} s",
    )


def headline(capacity: Capacity) -> str:
    """Return the answer in one sentence. What ends the sessions first stands first."""
    asked = next(answer for answer in capacity.answers if answer.keep == capacity.keep)
    kept = f"hits stay above {100 * capacity.keep:g} % of what is possible"
    collapse = capacity.collapse
    if collapse is not None and collapse.sessions.high < asked.sessions.low:
        clauses = [
            f"{_full_from(collapse)}, before the cache ends",
            f"{kept} up to {_range(asked.sessions)} sessions",
        ]
    else:
        clauses = [f"{sessions(asked.sessions)} at once ({kept})"]
        if collapse is not None:
            clauses.append(f"saturates at {_range(collapse.sessions)}{_mark(collapse.trusted)}")
    if capacity.slo is not None:
        slo = capacity.slo
        clauses.append(f"within {_limits(slo)} {_range(slo.sessions)}{_mark(slo.trusted)}")
    if capacity.replicas is not None and capacity.replicas.by_seed:
        clauses.append(fewest(capacity.replicas))
    best = _best(capacity, asked)
    if best is not None and best.sessions is not None:
        clauses.append(f"with {best.name} {_range(best.sessions)}")
    return "; ".join(clauses)


def _full_from(collapse: Collapse) -> str:
    return f"the device is full from {_range(collapse.sessions)}{_mark(collapse.trusted)} sessions on"


def _best(capacity: Capacity, asked: Answer) -> Remedy | None:
    """Return the remedy that brings most sessions without more memory."""
    least = mean(asked.sessions.by_seed) + MOVED
    moved = [
        (mean(remedy.sessions.by_seed), remedy)
        for remedy in capacity.remedies
        if remedy.sessions is not None and not remedy.more_memory and mean(remedy.sessions.by_seed) > least
    ]
    return max(moved, key=lambda pair: pair[0])[1] if moved else None


def _banners(capacity: Capacity) -> tuple[Banner, ...]:
    if capacity.cost.trusted:
        return ()
    text = (
        "Times and ranges marked * are of step costs that are not known or not trusted. How many sessions keep their "
        "hits hardly depends on them."
    )
    return (Banner("warn", "Where the device is full is not known to a session", text),)


def _sections(capacity: Capacity) -> Iterator[Section]:
    yield Section(
        "curve",
        "How many sessions fit",
        facts=tuple(given(capacity)),
        tables=(grid(CURVE, [point_row(point, capacity) for point in _replayed(capacity)], "Exact replays"),),
        notes=(*_answers(capacity), *preempted(capacity)),
        draw=lambda: [_chart(capacity)],
    )
    if capacity.cuts:
        heads = ("pauses cut at", "fit", "turns a minute, together")
        cuts = [
            (
                f"{cut.max_think:,.0f} s",
                sessions(cut.sessions),
                f"{cut.turns_a_minute:.0f}{_mark(capacity.cost.trusted)}",
            )
            for cut in capacity.cuts
        ]
        lead = "A session that pauses for long hardly uses the pool, and counts. Estimates."
        yield Section("cuts", "Where pauses are cut", lead=lead, tables=(grid(heads, cuts),))
    if capacity.remedies:
        rows = [(*remedy_row(remedy, capacity), said_of(remedy)) for remedy in capacity.remedies]
        yield Section(
            "remedies", "What moves it", lead=_of_remedies(capacity), tables=(grid(REMEDIES, rows),)
        )
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
        times = "not known*: replays take nominal ones, ranges marked * are over three costs 23x apart"
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
    """Return the cells of CURVE; a dash for what an estimate does not know, or what was not asked for."""
    within = [seed.met for seed in point.seeds if seed.met is not None]
    held = [seed.pool_most for seed in point.seeds if seed.pool_most is not None]
    sign = _mark(capacity.cost.trusted)
    return [
        f"{point.sessions:,}",
        _share([seed.kept for seed in point.seeds]),
        _share([seed.hit_rate for seed in point.seeds]),
        _spread([seed.computed_per_output for seed in point.seeds]),
        _twice(point) if _was_preempted(point) else "–",
        percent(max(held), digits=0) if held else "–",
        f"{median(seed.ttft_p50_s for seed in point.seeds):.2f} s{sign}",
        f"{_spread([seed.turns_a_minute for seed in point.seeds])}{sign}",
        f"{_share(within)}{sign}" if within else "–",
        f"{len(point.seeds)} {'replays' if point.by == 'replay' else ESTIMATE}",
    ]


def _answers(capacity: Capacity) -> Iterator[str]:
    for answer in capacity.answers:
        times = ", moves with step costs*" if answer.needs_times else ""
        limit = f"the limit is {LIMITS[answer.limit]}{times}"
        yield f"{100 * answer.keep:g} % of an infinite cache's hits: {sessions(answer.sessions)}; {limit}."
    if capacity.collapse is not None:
        yield f"{_full_from(capacity.collapse).capitalize()}: prompts wait most of the time, hits collapse."
    if capacity.slo is not None:
        slo = capacity.slo
        share = f"{100 * slo.met:g} % of the requests within {_limits(slo)}"
        yield f"{share}: {sessions(slo.sessions)}{_mark(slo.trusted)}."


def _of_remedies(capacity: Capacity) -> str:
    """Say what the remedies were replayed with."""
    base = next((remedy.base for remedy in capacity.remedies if remedy.base is not None), None)
    if base is None:
        return ""
    base_range = sessions(Range.of([base.sessions], base.sessions))
    share = "half of the time (with a host tier a quarter)"
    return f"Each was replayed with {base_range}, with one seed and {share}, and so was the engine as it is."


def remedy_row(remedy: Remedy, capacity: Capacity) -> tuple[str, str, str, str]:
    """Return a remedy's name, the hits kept before and with it, its sessions, and from where it is full."""
    if remedy.at is None:
        return remedy.name, "–", "no change" if remedy.why_not else "–", "–"
    base = _share([seed.kept for seed in remedy.base.seeds]) if remedy.base is not None else "–"
    full = remedy.collapse if capacity.cost.source != "plausible" else None
    return (
        remedy.name,
        f"{base} -> {_share([seed.kept for seed in remedy.at.seeds])} at {remedy.at.sessions}",
        _range(remedy.sessions) if remedy.sessions is not None else "–",
        f"{_range(full)}{_mark(capacity.cost.trusted)}" if full is not None else "–",
    )


def said_of(remedy: Remedy) -> str:
    """Return what stands beside a remedy: why it was not tried, its price, what it does against preemptions."""
    twice = ""
    if remedy.base is not None and remedy.at is not None and _twice(remedy.base) != _twice(remedy.at):
        twice = f"computed twice {_twice(remedy.base)} -> {_twice(remedy.at)} of all tokens"
    return remedy.why_not or "; ".join(filter(None, (remedy.note, twice)))


def preempted(capacity: Capacity) -> Iterator[str]:
    """Yield what preemptions cost at each replayed number of sessions."""
    points = [point for point in _replayed(capacity) if _was_preempted(point)]
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
    most = replicas.most
    fewest = Range.of([number or most + 1 for number in replicas.by_seed], most)
    return f"{load} {_range(fewest)} replica{'' if fewest.high == 1 else 's'} ({replicas.router})"


def shared(replicas: Replicas) -> Iterator[str]:
    """Yield how many engines the load needs, and what each number of them keeps."""
    if replicas.why_not:
        yield f"How many replicas was not replayed: {replicas.why_not}"
        return
    yield f"{fewest(replicas)}, by exact replays; an infinite cache is 100 %"
    for number in sorted({point.replicas for point in replicas.tried}):
        points = [point for point in replicas.tried if point.replicas == number]
        enough = sum(point.enough for point in points)
        verdict = "enough" if enough == len(points) else "enough with some seeds" if enough else "not enough"
        limits = [point.met for point in points if point.met is not None]
        within = f", {_share(limits)} of the requests within limits" if limits else ""
        uneven = [point.balance for point in points if point.balance is not None and number > 1]
        busiest = f", the busiest computes {max(uneven):.2f}x the mean" if uneven else ""
        yield f"{number}: {_share([point.kept for point in points])} of the hits kept{within}{busiest}: {verdict}"


def _replayed(capacity: Capacity) -> list[Point]:
    return [point for point in capacity.curve if point.by == "replay"]


def _was_preempted(point: Point) -> bool:
    return any(seed.preempted for seed in point.seeds)


def _twice(point: Point) -> str:
    return _share([seed.twice for seed in point.seeds], digits=1)


def _limits(limits: Limits) -> str:
    return ",".join(f"{name}={most:g}" for name, most in limits.limits.items())


def _mark(trusted: bool) -> str:
    return "" if trusted else "*"


def sessions(numbers: Range) -> str:
    return f"{_range(numbers)} session{'' if numbers.high == 1 else 's'}"


def _range(numbers: Range) -> str:
    ends = (numbers.low, numbers.high)
    low, high = (f"over {numbers.most}" if end > numbers.most else f"{end:,}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _share(values: Sequence[float], digits: int = 0) -> str:
    low, high = (f"{100 * value:.{digits}f}" for value in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low}–{high} %"


def _spread(values: Sequence[float]) -> str:
    low, high = (f"{value:.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def _chart(capacity: Capacity) -> Chart:
    """Draw the share of the hits that is kept, mean and range over seeds, and both regions."""
    import altair as alt

    points = capacity.curve
    kinds = [REPLAY if point.by == "replay" else ESTIMATE for point in points]
    kept = columns(
        sessions=[point.sessions for point in points],
        kept=[100 * point.kept.mean for point in points],
        low=[100 * point.kept.low for point in points],
        high=[100 * point.kept.high for point in points],
        by=kinds,
    )
    asked = next(answer for answer in capacity.answers if answer.keep == capacity.keep)
    last = max(point.sessions for point in points)
    regions = [(asked.sessions.low, asked.sessions.high, f"ends by {LIMITS[asked.limit]}")]
    collapse = capacity.collapse
    if collapse is not None and collapse.sessions.low <= last:
        regions.append((collapse.sessions.low, min(collapse.sessions.high, last), "the device is full"))
    ends = columns(
        start=[low - 0.5 for low, _, _ in regions],
        stop=[high + 0.5 for _, high, _ in regions],
        what=[what for _, _, what in regions],
    )
    base = alt.Chart(alt.NamedData(name="kept"), height=260)
    scale = alt.Scale(domain=[0, last + 1])
    across = alt.X("sessions:Q", title="sessions at once", scale=scale, axis=alt.Axis(format="d"))
    colors = alt.Scale(domain=[REPLAY, ESTIMATE], range=["var(--c-hit)", "var(--c4)"])
    color = alt.Color("by:N", title=None, scale=colors)
    share = alt.Y("kept:Q", title="hits kept (%)", scale=alt.Scale(domain=[0, 100]))
    drawing = alt.layer(
        alt.Chart(alt.NamedData(name="ends"))
        .mark_rect(opacity=0.12)
        .encode(
            x=alt.X("start:Q", title="sessions at once"),
            x2="stop:Q",
            color=alt.Color("what:N", title=None, legend=None),
            tooltip=[alt.Tooltip("what:N", title=" ")],
        ),
        base.mark_rule().encode(
            x=across, y=alt.Y("low:Q", title="hits kept (%)"), y2="high:Q", color=color.legend(None)
        ),
        base.mark_point(filled=True, size=50).encode(
            x=across,
            y=share,
            color=color,
            tooltip=[
                alt.Tooltip("sessions:Q", title="sessions"),
                alt.Tooltip("kept:Q", title="hits kept (%)", format=".1f"),
                alt.Tooltip("by:N", title=" "),
            ],
        ),
    ).resolve_scale(color="independent")
    ranges = [map(percent, (point.kept.mean, point.kept.low, point.kept.high)) for point in points]
    rows = [
        (point.sessions, *shares, kind) for point, shares, kind in zip(points, ranges, kinds, strict=True)
    ]
    return Chart(
        "kept",
        "Hits that are kept, of what is possible",
        headline(capacity),
        spec_of(drawing),
        grid(
            ("sessions", "hits kept", "lowest seed", "highest seed", "by"),
            rows,
            "Share of an infinite cache's hits",
        ),
        {"kept": kept, "ends": ends},
        "A line is the range over seeds. Shaded: where the answer ends, by seed, and where the device is full.",
    )
