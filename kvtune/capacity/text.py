"""The answer of `kvtune capacity` on a terminal. In the CLI's process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtune.capacity.result import Answer, Capacity, Limits, Point, Range, Remedy, Replicas
from kvtune.causes import CAUSES
from kvtune.commands import command
from kvtune.terminal import Column, FittedTable, console, folded, one_line
from kvtune.units import count, percent, size

WIDTH = 120
MOVED = 2
"""A remedy whose mean number of sessions is this much higher stands in the first line."""

LIMITS = {
    "pool": "the pool",
    "device": "the device",
    "max_num_seqs": "max_num_seqs",
    "one request": "the pool holds not even one session",
    "none": "nothing up to there",
}
WITHIN, TWICE = "within limits", "computed twice"
CURVE = (
    Column("sessions"),
    Column("hits kept"),
    Column("hit rate", rank=1),
    Column("computed per output token", rank=4),
    Column(TWICE, rank=3),
    Column("pool held, most", rank=3),
    Column("p50 first token", rank=2),
    Column("turns a minute", rank=2),
    Column(WITHIN, rank=1),
    Column("by"),
)
REMEDIES = (Column("what moves it"), Column("hits kept"), Column("sessions"))
FULL = Column("full from", rank=1)


def first_line(found: Capacity) -> str:
    """Return the answer in one line."""
    asked = _asked(found)
    said = f"{numbers(asked.sessions)} at once (hits stay above {100 * found.keep:g} % of what is possible)"
    if found.collapse is not None:
        mark = "" if found.collapse.trusted else "*"
        said += f"; saturates at {_range(found.collapse.sessions)}{mark}"
    if found.slo is not None:
        said += f"; within {_slo(found.slo)} {_range(found.slo.sessions)}{'' if found.slo.trusted else '*'}"
    if found.replicas is not None and found.replicas.by_seed:
        said += f"; {fewest(found.replicas)}"
    best = _best(found, asked)
    if best is not None and best.sessions is not None:
        said += f"; with {best.name} {_range(best.sessions)}"
    return said


def _best(found: Capacity, asked: Answer) -> Remedy | None:
    """Return the remedy that brings most sessions without more memory."""
    least = _mean(asked.sessions) + MOVED
    moved = [
        (_mean(one.sessions), one)
        for one in found.remedies
        if one.sessions is not None and not one.more_memory and _mean(one.sessions) > least
    ]
    return max(moved, key=lambda pair: pair[0])[1] if moved else None


def print_capacity(found: Capacity) -> None:
    out = console(WIDTH)

    def say(line: str = "") -> None:
        out.print("\n".join(folded(one_line(line), WIDTH)), markup=False, highlight=False)

    say(first_line(found))
    say()
    for line in given(found):
        say(line)
    say()
    points = _shown(found)
    left_out = {WITHIN} if found.slo is None else set()
    left_out |= {TWICE} if not any(map(_preempted, points)) else set()
    shown = [at for at, column in enumerate(CURVE) if column.head not in left_out]
    rows = [[row[at] for at in shown] for row in map(point_row, points)]
    out.print(FittedTable([CURVE[at] for at in shown], rows, gap=2))
    for line in preempted(found):
        say(line)
    say()
    for answer in found.answers:
        say(answered(answer))
    if found.collapse is not None:
        mark = "" if found.collapse.trusted else "*"
        say(
            f"from {_range(found.collapse.sessions)} sessions on   prompts wait most of the time, hits collapse{mark}"
        )
    if found.slo is not None:
        share = f"{100 * found.slo.met:g} % of the requests within {_slo(found.slo)}"
        say(f"{share}: {numbers(found.slo.sessions)}{'' if found.slo.trusted else '*'}")
    for cut in found.cuts:
        say(
            f"pauses cut at {cut.max_think:,.0f} s: {numbers(cut.sessions)}, {cut.turns_a_minute:.0f} turns a minute "
            "together (estimate)"
        )
    if found.remedies:
        say()
        times = found.cost.source != "plausible"
        rows = [list(remedy_row(one))[: 4 if times else 3] for one in found.remedies]
        out.print(FittedTable((*REMEDIES, *([FULL] if times else [])), rows, gap=2))
        for one in found.remedies:
            if said_of(one):
                say(f"{one.name}: {said_of(one)}")
    say()
    for unknown in found.cannot_say:
        say(f"cannot say: {unknown.what}: {unknown.why}. Next: {unknown.next}")
    for line in shared(found.replicas) if found.replicas is not None else ():
        say(line)
    if found.recipe:
        again = command("recipe", "verify", found.recipe)
        say(f"recipe: {found.recipe}, holds for up to {found.held} sessions at once; to check it: `{again}`")
    say(f"{found.replays} replays, {found.estimates:,} estimates, {found.elapsed_s:.0f} s")


def given(found: Capacity) -> Iterator[str]:
    load, pool, cost = found.load, found.pool, found.cost
    yield (
        f"{load.sessions:,} sessions ({count(load.requests)} requests, mean prompt {count(load.prompt_mean)} tokens; "
        f"pauses median {load.think_p50:g} s, p90 {load.think_p90:g} s, cut at {load.cut:g} s: "
        f"{percent(load.cut_turns)} of turns), {found.hours:g} hours, measured after a third"
    )
    memory = f" ({size(pool.bytes)})" if pool.bytes else ""
    assumes = f" ({pool.assumes})" if pool.assumes else ""
    yield (
        f"pool: {pool.blocks:,} blocks = {count(pool.tokens)} tokens{memory}: {pool.contexts:.1f} mean "
        f"prompts{assumes}"
    )
    if cost.source == "plausible":
        yield "*step costs are not known: replays take nominal ones, ranges marked * are over three costs 23x apart"
    else:
        trust = "trusted" if cost.trusted else "NOT trusted*"
        times = f"{cost.step_ms:.3g} ms + {cost.prompt_token_ms:.3g} ms a prompt token"
        times += f" + {cost.decode_ms:.3g} ms a decode" if cost.decode_ms else ""
        yield f"step cost: {times}, {trust} ({cost.source}{': ' if cost.note else ''}{cost.note})"
    if load.left_out_requests:
        yield f"left out: {load.left_out_requests:,} requests of sessions that grow too long for this engine"
    for note in load.notes:
        yield f"note: {note}"


def _shown(found: Capacity) -> list[Point]:
    return [point for point in found.curve if point.by == "replay"]


def point_row(point: Point) -> list[str]:
    first = sorted(one.ttft_p50_s for one in point.seeds)
    within = [one.met for one in point.seeds if one.met is not None]
    most = [one.pool_most for one in point.seeds if one.pool_most is not None]
    return [
        f"{point.sessions:,}",
        _share([one.kept for one in point.seeds]),
        _share([one.hit_rate for one in point.seeds]),
        _spread([one.computed_per_output for one in point.seeds]),
        _twice(point) if _preempted(point) else "–",
        percent(max(most), digits=0) if most else "–",
        f"{first[len(first) // 2]:.2f} s",
        _spread([one.turns_a_minute for one in point.seeds]),
        _share(within) if within else "–",
        f"{len(point.seeds)} replays" if point.by == "replay" else f"{len(point.seeds)} estimates",
    ]


def remedy_row(one: Remedy) -> tuple[str, str, str, str]:
    """Return a remedy's name, the hits kept before and with it, its sessions, and from where it is full."""
    if one.at is None:
        return one.name, "–", "no change" if one.why_not else "–", "–"
    base = (
        _share([each.kept for each in one.base.seeds][: len(one.at.seeds)]) if one.base is not None else "–"
    )
    return (
        one.name,
        f"{base} -> {_share([each.kept for each in one.at.seeds])} at {one.at.sessions}",
        _range(one.sessions) if one.sessions is not None else "–",
        _range(one.collapse) if one.collapse is not None else "–",
    )


def said_of(one: Remedy) -> str:
    """Return what stands beside a remedy: why it was not tried, its price, what it does against preemptions."""
    twice = ""
    if one.base is not None and one.at is not None and _twice(one.base) != _twice(one.at):
        twice = f"computed twice {_twice(one.base)} -> {_twice(one.at)} of all tokens"
    return one.why_not or "; ".join(filter(None, (one.note, twice)))


def preempted(found: Capacity) -> Iterator[str]:
    """Yield what preemptions cost at each replayed number of sessions."""
    points = [point for point in _shown(found) if _preempted(point)]
    for point in points:
        causes: dict[str, int] = {}
        for seed in point.seeds:
            for cause, tokens in (seed.computed_twice or {}).items():
                causes[cause] = causes.get(cause, 0) + tokens
        requests = _spread([float(seed.preempted or 0) for seed in point.seeds])
        mean = {cause: tokens / len(point.seeds) for cause, tokens in causes.items()}
        told = ", ".join(f"{CAUSES[cause].title} {count(tokens)}" for cause, tokens in mean.items())
        yield (
            f"{point.sessions:,} sessions: {requests} requests were preempted; tokens computed twice, mean of the "
            f"seeds: {count(sum(mean.values()))}, {_twice(point)} of all{f' ({told})' if told else ''}"
        )
    if not points:
        yield "no replay preempted a request: no token was computed twice"


def fewest(of: Replicas) -> str:
    """Return how many engines the load needs, in words."""
    load = f"{of.sessions} sessions" if of.sessions else "this load as it is"
    found = [one or of.most + 1 for one in of.by_seed]
    low, high = (f"over {of.most}" if one > of.most else f"{one}" for one in (min(found), max(found)))
    count_ = low if low == high else f"{low} to {high}"
    return f"{load} need{'s' if not of.sessions else ''} {count_} replica{'' if count_ == '1' else 's'} ({of.router})"


def shared(of: Replicas) -> Iterator[str]:
    """Yield how many engines the load needs, and what each number of them keeps."""
    if of.why_not:
        yield f"how many replicas: not replayed: {of.why_not}"
        return
    yield f"{fewest(of)}, by exact replays; one cache that forgets nothing is 100 %"
    for count_ in sorted({point.replicas for point in of.tried}):
        points = [point for point in of.tried if point.replicas == count_]
        enough = sum(point.enough for point in points)
        verdict = (
            "enough" if enough == len(points) else "not enough" if not enough else "enough with some seeds"
        )
        limits = [point.met for point in points if point.met is not None]
        within = f", {_share(limits)} of the requests within limits" if limits else ""
        uneven = [point.balance for point in points if point.balance is not None and count_ > 1]
        busiest = f", the busiest computes {max(uneven):.2f}x the mean" if uneven else ""
        yield f"  {count_}: {_share([point.kept for point in points])} of the hits kept{within}{busiest}: {verdict}"


def _preempted(point: Point) -> bool:
    return any(seed.preempted for seed in point.seeds)


def _twice(point: Point) -> str:
    return _share([seed.twice for seed in point.seeds], digits=1)


def answered(one: Answer) -> str:
    times = ", moves with step costs*" if one.needs_times else ""
    limit = f"the limit is {LIMITS[one.limit]}{times}"
    return f"{100 * one.keep:g} % of an infinite cache's hits: {numbers(one.sessions)}; {limit}"


def _slo(of: Limits) -> str:
    return ",".join(f"{name}={most:g}" for name, most in of.limits.items())


def _asked(found: Capacity) -> Answer:
    return next(one for one in found.answers if one.keep == found.keep)


def _mean(of: Range) -> float:
    return sum(of.by_seed) / len(of.by_seed)


def numbers(of: Range) -> str:
    return f"{_range(of)} session{'' if of.high == 1 else 's'}"


def _range(of: Range) -> str:
    low, high = (f"over {of.most}" if one > of.most else f"{one:,}" for one in (of.low, of.high))
    return low if low == high else f"{low} to {high}"


def _share(values: Sequence[float], digits: int = 0) -> str:
    low, high = (f"{100 * one:.{digits}f}" for one in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low}–{high} %"


def _spread(values: Sequence[float]) -> str:
    low, high = (f"{one:.0f}" for one in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"
