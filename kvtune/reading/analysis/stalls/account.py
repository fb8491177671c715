"""A run's slow tokens: the cause of each gap over the limit, and the worst gaps with their evidence. Pure.

A gap is slow if it is longer than twice the median. The time by which it exceeds the median is its excess. The parts of
an excess add up to it exactly: what no record explains is `unknown`, and where the records explain more than the excess
(two processes waited at once), every part shrinks by the same factor. The largest part is the gap's cause. A
comparison shows, for each side, the mean of its runs by cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.types import Run
from kvtune.reading.analysis.processes import process_keys
from kvtune.reading.analysis.stalls.delays import (
    CAUSES,
    COLUMN,
    LOST,
    EngineTime,
    StepTimes,
    WithoutCpu,
    collected,
    delivery,
    engine_time,
    step_times,
)
from kvtune.reading.analysis.stalls.times import Gaps, Rows, token_gaps

MOST_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Evidence:
    """A field that does not apply is empty, None or 0.

    `process`: the one that collected or had no CPU. `requests`: up to eight of the `prefilling` ones, those done first.
    `step_ms`: length of the longest step; `fitted_ms`: the usual time for its work.
    """

    process: str = ""
    stopped: bool = False
    requests: tuple[str, ...] = ()
    prefilling: int = 0
    prompt_tokens: int = 0
    generation: int | None = None
    pause_ms: float | None = None
    line: str = ""
    step_ms: float | None = None
    fitted_ms: float | None = None


def evidence(
    run: Run, steps: StepTimes | None, engine: EngineTime | None, gap: Gaps, cause: str, way: WithoutCpu
) -> Evidence:
    """Return the evidence for a gap (one row) with this cause. `way`: time without a CPU on the way to the client."""
    if steps is None or engine is None or not gap.known[0]:
        return Evidence()
    own = np.arange(int(gap.before[0]) + 1, int(gap.made[0]) + 1)
    if cause == "collection":
        return _collection(run, steps, gap, own)
    if cause == "prefill":
        return _prefill(run, steps, gap, own)
    step_s = steps.end_s[own] - steps.start_s[own]
    longest = int(step_s.argmax())
    step_ms, fitted_ms = float(step_s[longest]) * 1000.0, float(engine.fitted_s[own[longest]]) * 1000.0
    if cause != "off_cpu":
        return Evidence(step_ms=step_ms, fitted_ms=fitted_ms)
    parts_s = engine.parts[own, COLUMN["off_cpu"]]
    keys = process_keys(run)
    if float(parts_s.sum()) < way.seconds:
        return Evidence(process=keys[way.process] if way.process >= 0 else "front_end", stopped=way.stopped)
    step = own[int(parts_s.argmax())]
    process = int(engine.off_cpu.process[step])
    return Evidence(keys[process], bool(engine.off_cpu.stopped[step]), step_ms=step_ms, fitted_ms=fitted_ms)


def _collection(run: Run, steps: StepTimes, gap: Gaps, own: Rows) -> Evidence:
    """Find the longest collection that delayed the token: in the engine until it was made, then in the front end."""
    gc, keys = run.table("gc"), process_keys(run)
    front_end = np.isin(
        gc["process"], [i for i, p in enumerate(run.header.processes) if p.role == "front_end"]
    )
    made_s = steps.end_s[own[-1]]
    begin_s = np.where(front_end, made_s, steps.end_s[gap.before[0]])
    end_s = np.where(front_end, gap.end_s[0], made_s)
    pause_s = np.nan_to_num(gc["pause_us"]) / 1e6
    overlap_s = np.minimum(gc["t_s"] + pause_s, end_s) - np.maximum(gc["t_s"], begin_s)
    row = int(overlap_s.argmax())
    process, line = int(gc["process"][row]), int(gc["line"][row])
    counts = run.header.extra.ledger.get(str(process))
    lines = counts.lines if counts is not None else []
    return Evidence(
        process=keys[process],
        generation=int(gc["generation"][row]),
        pause_ms=float(pause_s[row]) * 1000.0,
        line=lines[line - 1] if 0 < line <= len(lines) else "",
    )


def _prefill(run: Run, steps: StepTimes, gap: Gaps, own: Rows) -> Evidence:
    """Name the requests that probably prefilled (which is not recorded): those sent and still without a token."""
    requests = run.table("requests")
    others = np.flatnonzero(np.isfinite(requests["sent_s"]))
    others = others[others != gap.request[0]]
    first = requests["first_token_s"][others]
    done_in = np.where(
        np.isfinite(first), np.searchsorted(steps.end_s, first, side="right") - 1, len(steps.end_s)
    )
    named: dict[int, None] = {}
    for step in own[steps.table["prefill_tokens"][own] > 0].tolist():
        decodes = steps.table["scheduled_tokens"][step] - steps.table["prefill_tokens"][step]
        many = int(max(1, steps.table["requests"][step] - decodes))
        here = np.flatnonzero((requests["sent_s"][others] < steps.end_s[step]) & (done_in >= step))
        here = here[np.lexsort((requests["sent_s"][others[here]], done_in[here]))][:many]
        named |= dict.fromkeys(others[here].tolist())
    return Evidence(
        requests=tuple(str(requests["id"][i]) for i in list(named)[:MOST_REQUESTS]),
        prefilling=len(named),
        prompt_tokens=int(steps.table["prefill_tokens"][own].sum()),
    )


SLOW = 2.0
"""A gap is slow if it is longer than this many medians."""

ROUNDING = 1e-6
"""A smaller unexplained share of an excess is rounding error."""

WORST = 5
"""The number of stalls that are described one by one."""


@dataclass(frozen=True, slots=True)
class CauseShare:
    """One cause. `gaps`: number of gaps of which it is the largest cause. `excess_ms`: its part of all gaps' excess."""

    gaps: int
    excess_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The slow gaps that ended with the tokens of one step: their number (`gaps`), and the longest of them."""

    start_s: float
    end_s: float
    gap_ms: float
    excess_ms: float
    request: str
    gaps: int
    cause: str
    parts_ms: dict[str, float]
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Stalls:
    """`slow` of `gaps` are over `limit_ms`; they ended in `stalls` steps. `causes`: by cause, the largest part first.

    `lost_ms`: by cause, time of the stalls in which no process worked for a request; the time of a step counts once.
    """

    gaps: int = 0
    median_ms: float | None = None
    limit_ms: float | None = None
    slow: int = 0
    stalls: int = 0
    excess_ms: float = 0.0
    causes: dict[str, CauseShare] = field(default_factory=dict)
    worst: tuple[Stall, ...] = ()
    lost_ms: dict[str, float] = field(default_factory=dict)


def stalls(run: Run, shown: int = WORST) -> Stalls:
    """Account for a run's slow gaps, with the `shown` worst stalls. Without recorded steps every cause is unknown."""
    steps = step_times(run)
    none = np.empty(0)
    gaps = token_gaps(run, *((steps.start_s, steps.end_s) if steps is not None else (none, none)))
    gap_s = gaps.end_s - gaps.begin_s
    if not len(gap_s):
        return Stalls()
    median_s = float(np.median(gap_s))
    slow = np.flatnonzero(gap_s > SLOW * median_s)
    count = len(gap_s)
    if not len(slow):
        return Stalls(count, median_s * 1000.0, SLOW * median_s * 1000.0)
    excess_s = gap_s[slow] - median_s
    records = _records(run, steps, gaps, slow, (SLOW - 1.0) * median_s)
    parts_s = _whole(records.parts_s, excess_s)
    late = gaps.of(slow)
    group = _group(late, SLOW * median_s)
    leaders = _leaders(group, excess_s)
    ranked = leaders[np.argsort(-excess_s[leaders], kind="stable")]
    return Stalls(
        gaps=count,
        median_ms=median_s * 1000.0,
        limit_ms=SLOW * median_s * 1000.0,
        slow=len(slow),
        stalls=len(leaders),
        excess_ms=float(excess_s.sum()) * 1000.0,
        causes=_causes(parts_s),
        worst=tuple(
            _stall(run, steps, records, late, parts_s, int(row), int((group == group[row]).sum()))
            for row in ranked[:shown]
        ),
        lost_ms={cause: float(parts_s[leaders, COLUMN[cause]].sum()) * 1000.0 for cause in LOST},
    )


@dataclass(frozen=True, slots=True)
class Records:
    """What the run file shows about the slow gaps. `parts_s`: seconds above the usual, by gap and cause, which need not
    add up to the excess. `way`: for each gap, time without a CPU on the token's way to the client.
    """

    parts_s: NDArray[np.float64]
    way: tuple[WithoutCpu, ...]
    engine: EngineTime | None = None


def _records(run: Run, steps: StepTimes | None, gaps: Gaps, slow: Rows, slow_s: float) -> Records:
    parts_s = np.zeros((len(slow), len(CAUSES)))
    known_gaps = np.flatnonzero(gaps.known)
    if steps is None or not len(known_gaps):
        return Records(parts_s, (WithoutCpu(),) * len(slow))
    usual = gaps.made[known_gaps] == gaps.before[known_gaps] + 1
    processes = [i for i, p in enumerate(run.header.processes) if p.role in ("engine_core", "worker")]
    pauses = collected(run, sorted({*processes, steps.process}), slow_s)
    engine = engine_time(run, steps, gaps.made[known_gaps][usual], *pauses)
    explained = np.isin(slow, known_gaps)
    late = gaps.of(slow[explained])
    parts_s[explained] = _engine_parts_s(run, steps, engine, late)
    # A token that was made before the previous one was delivered did not wait for a step.
    waited_s = np.maximum(steps.end_s[late.made] - late.begin_s, 0.0)
    parts_s[explained] *= np.minimum(waited_s / np.maximum(parts_s[explained].sum(axis=1), 1e-12), 1.0)[
        :, None
    ]
    delivered = delivery(run, steps, late, gaps.of(known_gaps[usual]), slow_s)
    parts_s[explained] += delivered.parts
    way = [WithoutCpu()] * len(slow)
    for row, gap in enumerate(np.flatnonzero(explained).tolist()):
        way[gap] = delivered.without_cpu(row)
    return Records(parts_s, tuple(way), engine)


def _engine_parts_s(run: Run, steps: StepTimes, engine: EngineTime, late: Gaps) -> NDArray[np.float64]:
    """Return the parts from EngineCore's steps: after the step of the last token, up to the step of this one."""
    so_far = np.concatenate((np.zeros((1, len(CAUSES))), np.cumsum(engine.parts, axis=0)))
    parts = so_far[late.made + 1] - so_far[late.before + 1]
    without = late.made - late.before - 1  # steps that made no token of the request
    # In these steps another request's prompt took all the time.
    prefills = np.concatenate(([0], np.cumsum(steps.table["prefill_tokens"] > 0)))
    full = np.minimum(prefills[late.made] - prefills[late.before + 1], without)
    parts[:, COLUMN["prefill"]] += full * engine.usual_s
    times = np.zeros(int(late.request.max(initial=0)) + 1, np.int64)
    preemptions = run.table("requests")["preemptions"][: len(times)]
    times[: len(preemptions)] = preemptions
    thrown_out = np.concatenate(([0], np.cumsum(steps.table["preempted"] > 0)))
    seen = thrown_out[late.made + 1] > thrown_out[late.before + 1]
    preempted = (without > 0) & (times[late.request] > 0) & (seen | (thrown_out[-1] == 0))
    parts[preempted] = 0.0
    whole_s = steps.end_s[late.made] - steps.end_s[late.before]
    parts[preempted, COLUMN["preemption"]] = np.maximum(whole_s - engine.usual_s, 0.0)[preempted]
    return parts


def _whole(parts_s: NDArray[np.float64], excess_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Make each gap's parts add up to its excess: scale parts that exceed it, else the rest becomes `unknown`."""
    explained = parts_s.sum(axis=1)
    whole = explained >= excess_s * (1.0 - ROUNDING)
    parts = parts_s * np.where(whole, excess_s / np.maximum(explained, 1e-12), 1.0)[:, None]
    parts[:, COLUMN["unknown"]] = np.where(whole, 0.0, excess_s - explained)
    return np.asarray(parts)


def _group(late: Gaps, limit_s: float) -> Rows:
    """Return a number for each gap: one per step whose tokens ended it, or per stretch of time if steps are unknown."""
    return np.where(late.known, late.made, -1 - np.floor(late.end_s / limit_s).astype(np.int64))


def _leaders(group: Rows, excess_s: NDArray[np.float64]) -> Rows:
    """Return the gap with the largest excess of each group."""
    order = np.lexsort((-excess_s, group))
    first = np.concatenate(([True], group[order][1:] != group[order][:-1]))
    return np.asarray(order[first])


def _causes(parts_s: NDArray[np.float64]) -> dict[str, CauseShare]:
    sums = parts_s.sum(axis=0)
    largest = np.bincount(parts_s.argmax(axis=1), minlength=len(CAUSES))
    evidence = {
        cause: CauseShare(int(largest[i]), float(sums[i]) * 1000.0, float(sums[i] / sums.sum()))
        for cause, i in COLUMN.items()
        if sums[i] > 0
    }
    return dict(sorted(evidence.items(), key=lambda item: -item[1].excess_ms))


def _stall(
    run: Run,
    steps: StepTimes | None,
    records: Records,
    late: Gaps,
    parts_s: NDArray[np.float64],
    row: int,
    gaps: int,
) -> Stall:
    own = parts_s[row]
    cause = list(CAUSES)[int(own.argmax())]
    delay = late.of(np.array([row]))
    ids = run.table("requests")["id"]
    request = int(delay.request[0])
    return Stall(
        start_s=float(delay.begin_s[0]),
        end_s=float(delay.end_s[0]),
        gap_ms=float(delay.end_s[0] - delay.begin_s[0]) * 1000.0,
        excess_ms=float(own.sum()) * 1000.0,
        request=str(ids[request]) if request < len(ids) else str(request),
        gaps=gaps,
        cause=cause,
        parts_ms={name: float(own[i]) * 1000.0 for name, i in COLUMN.items() if own[i] > 0},
        evidence=evidence(run, steps, records.engine, delay, cause, records.way[row]),
    )


@dataclass(frozen=True, slots=True)
class SideStalls:
    """Means of a side's runs. `causes`: for each cause, the number of gaps that it dominates and its total in ms."""

    limit_ms: float
    slow: float
    excess_ms: float
    causes: dict[str, tuple[float, float]]


def side_stalls(accounts: Sequence[Stalls]) -> SideStalls | None:
    """Return a side's means from the accounts of its runs; None if no run has gaps between tokens."""
    limited = [(account, account.limit_ms) for account in accounts if account.limit_ms is not None]
    if not limited:
        return None
    nothing = CauseShare(0, 0.0, 0.0)
    causes = {}
    for cause in CAUSES:
        shares = [account.causes.get(cause, nothing) for account, _ in limited]
        causes[cause] = (fmean(share.gaps for share in shares), fmean(share.excess_ms for share in shares))
    return SideStalls(
        fmean(limit_ms for _, limit_ms in limited),
        fmean(account.slow for account, _ in limited),
        fmean(account.excess_ms for account, _ in limited),
        {cause: (gaps, ms) for cause, (gaps, ms) in causes.items() if ms > 0},
    )
