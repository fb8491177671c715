"""A recorded server over time: what it did in a stretch of time, its worst minute, restarts, stalls, floods. Pure.

In: a run with the table `looks`. A time of a histogram is known up to its bucket: such quantiles are `Bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.types import Run, Table
from kvtune.data.tally import Tally

MINUTE_S = 60.0
FEWEST = 8
"""Fewest first tokens of a stretch whose mean is compared."""
PARTS = 4
"""A recording below two minutes is told by a part of it: this share."""
LEAST_STALL_S = 1.0
LEAST_FLOOD = 8
"""The fewest requests by which the queue grows in a flood."""
FALLS = 0.5
"""A flood is over when the queue is shorter than this share of its longest."""
MOST_MOMENTS = 200

Mask = NDArray[np.bool_]
Kind = Literal["restart", "no answer", "stall", "flood"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """A time in milliseconds that is more than `above`, and `upto` at most; None: no bound."""

    above: float
    upto: float | None


@dataclass(frozen=True, slots=True)
class Waits:
    """Times of `count` requests: the mean is exact."""

    count: int = 0
    mean_ms: float | None = None
    p50_ms: Bounds | None = None
    p99_ms: Bounds | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a server did in some looks of a recording, `seconds` in all. None: the server does not publish it."""

    begin_s: float
    end_s: float
    seconds: float
    came: int | None
    answered: int | None
    tally: Tally | None
    output_tokens: int | None
    first_token: Waits
    queue: Waits
    running: int | None
    waiting: int | None
    pool_use: float | None
    stalled_s: float | None
    preemptions: int
    evicted_blocks: int
    restarts: int
    lost: int


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that is marked on the time axis. `size`: lost looks, seconds, or requests by which the queue grew."""

    kind: Kind
    begin_s: float
    end_s: float
    size: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """`worst` and `rest` are None if no stretch of the recording can be called its worst."""

    whole: Stretch
    worst: Stretch | None = None
    rest: Stretch | None = None
    moments: tuple[Moment, ...] = field(default_factory=tuple)


def timeline(run: Run) -> Timeline | None:
    """Return the server's timeline; None if the run has none."""
    looks = run.table("looks")
    if not len(looks["t_s"]):
        return None
    whole, worst = stretch(run, np.ones(len(looks["t_s"]), dtype=np.bool_)), _worst(looks)
    if worst is None:
        return Timeline(whole, moments=moments(looks))
    return Timeline(whole, stretch(run, worst), stretch(run, ~worst), moments(looks))


def stretch(run: Run, rows: Mask) -> Stretch:
    """Return what the server did in these rows of `looks`."""
    looks = run.table("looks")
    places = np.flatnonzero(rows)

    def total(name: str) -> int | None:
        value = float(looks[name][places].sum())
        return None if math.isnan(value) else max(0, round(value))

    def most(name: str) -> float | None:
        values = looks[name][places]
        finite = values[np.isfinite(values)]
        return float(finite.max()) if len(finite) else None

    running, waiting = most("running"), most("waiting")
    stalled = float(looks["stalled_s"][places].sum())
    causes = run.table("look_misses")
    chosen = np.isin(causes["look"], places)
    misses: dict[str, int] = {}
    for cause, tokens in zip(
        causes["cause"][chosen].tolist(), causes["tokens"][chosen].tolist(), strict=True
    ):
        misses[cause] = misses.get(cause, 0) + tokens
    query, hit = total("query_tokens"), total("hit_tokens")
    return Stretch(
        begin_s=float(looks["t_s"][places[0]]),
        end_s=float(looks["until_s"][places[-1]]),
        seconds=float((looks["until_s"][places] - looks["t_s"][places]).sum()),
        came=total("came"),
        answered=total("answered"),
        tally=Tally(query, hit, misses) if query is not None and hit is not None else None,
        output_tokens=total("output_tokens"),
        first_token=waits(run, places, "first_token", ("first_tokens", "first_token_s")),
        queue=waits(run, places, "queue", ("queued", "queue_s")),
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        pool_use=most("pool_use"),
        stalled_s=None if math.isnan(stalled) else stalled,
        preemptions=int(looks["preemptions"][places].sum()),
        evicted_blocks=int(looks["evicted_blocks"][places].sum()),
        restarts=int(looks["restarts"][places].sum()),
        lost=int(looks["lost"][places].sum()),
    )


def waits(run: Run, places: NDArray[np.intp], what: str, columns: tuple[str, str]) -> Waits:
    """Return the times of a histogram in these rows. `columns`: its count and its sum."""
    looks, times = run.table("looks"), run.table("look_times")
    counted, seconds = (float(looks[name][places].sum()) for name in columns)
    if math.isnan(counted) or not counted:
        return Waits()
    chosen = (times["what"] == what) & np.isin(times["look"], places)
    buckets = {name: times[name][chosen] for name in ("above_s", "upto_s", "count")}
    mean = None if math.isnan(seconds) else 1000 * seconds / counted
    return Waits(round(counted), mean, bounds(buckets, 0.5), bounds(buckets, 0.99))


def bounds(buckets: Mapping[str, NDArray[np.float64]], share: float) -> Bounds | None:
    """Return the bucket that a quantile is in; None if there is no count."""
    upto = np.where(np.isnan(buckets["upto_s"]), np.inf, buckets["upto_s"])
    order = np.argsort(upto, kind="stable")
    upto_now = np.cumsum(buckets["count"][order])
    if not len(order) or not upto_now[-1]:
        return None
    bucket = order[int(np.searchsorted(upto_now, share * upto_now[-1]))]
    high = float(upto[bucket])
    return Bounds(1000 * float(buckets["above_s"][bucket]), None if math.isinf(high) else 1000 * high)


def _worst(looks: Table) -> Mask | None:
    """Return the rows of the worst minute: that with the longest mean until the first token, else the longest queue."""
    begin, end = looks["t_s"], looks["until_s"]
    whole_s = float(end[-1] - begin[0])
    length = MINUTE_S if whole_s >= 2 * MINUTE_S else whole_s / PARTS
    first = np.searchsorted(begin, end - length - 1e-6, side="left")
    rows = np.arange(len(begin))
    full = (end - begin[0] >= length - 1e-6) & (first <= rows)
    score = _means(looks["first_token_s"], looks["first_tokens"], first, FEWEST)
    if not np.isfinite(score[full]).any() or np.nanmax(score[full]) <= 0:
        seconds = end - begin
        score = _means(np.nan_to_num(looks["waiting"]) * seconds, seconds, first, 0)
    score = np.where(full & np.isfinite(score), score, -np.inf)
    if not len(score) or score.max() <= 0:
        return None
    last = int(np.argmax(score))
    chosen: Mask = (rows >= first[last]) & (rows <= last)
    return None if chosen.all() else chosen


def _means(
    sums: NDArray[np.float64], counts: NDArray[np.float64], first: NDArray[np.intp], fewest: float
) -> NDArray[np.float64]:
    """Return for each row the mean from row `first` up to it; NaN if there are fewer than `fewest`."""

    def since(values: NDArray[np.float64]) -> NDArray[np.float64]:
        upto = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(upto[1:] - upto[np.minimum(first, len(values))], dtype=np.float64)

    unknown = np.isnan(sums) | np.isnan(counts)
    whole = since(np.where(unknown, 0.0, counts))
    counted = (since(unknown.astype("f8")) == 0) & (whole >= max(fewest, 1e-9))
    mean = since(np.where(unknown, 0.0, sums)) / np.where(counted, whole, 1.0)
    return np.asarray(np.where(counted, mean, np.nan), dtype=np.float64)


def moments(looks: Table) -> tuple[Moment, ...]:
    """Return what is marked on the time axis, in order of time: of each kind the largest, up to MOST_MOMENTS."""
    begin, end = looks["t_s"], looks["until_s"]

    def marked(kind: Kind, sizes: NDArray[np.float64], *, joined: bool) -> list[Moment]:
        moments: list[Moment] = []
        for row in np.flatnonzero(sizes > 0).tolist():
            begun, size = float(begin[row]), float(sizes[row])
            if joined and moments and moments[-1].end_s == begun:
                begun, size = moments[-1].begin_s, moments[-1].size + size
                moments.pop()
            moments.append(Moment(kind, begun, float(end[row]), size))
        return moments

    stalls = marked("stall", np.nan_to_num(looks["stalled_s"]), joined=True)
    kinds = [
        marked("restart", looks["restarts"].astype("f8"), joined=False),
        marked("no answer", looks["lost"].astype("f8"), joined=True),
        [stall for stall in stalls if stall.size >= LEAST_STALL_S],
        _floods(looks),
    ]
    kept = [sorted(kind, key=lambda moment: -moment.size)[:MOST_MOMENTS] for kind in kinds]
    return tuple(sorted((moment for kind in kept for moment in kind), key=lambda moment: moment.begin_s))


def _floods(looks: Table) -> list[Moment]:
    """Return the stretches in which the queue grew by LEAST_FLOOD or more, from its shortest to its longest."""
    waiting, end = looks["waiting"], looks["until_s"]
    moments: list[Moment] = []
    low = high = None
    for row in np.flatnonzero(np.isfinite(waiting)).tolist():
        now = waiting[row]
        if low is None or high is None or now < FALLS * waiting[high] or now <= waiting[low]:
            moments += _flood(waiting, end, low, high)
            low = high = row
        elif now > waiting[high]:
            high = row
    return moments + _flood(waiting, end, low, high)


def _flood(
    waiting: NDArray[np.float64], end: NDArray[np.float64], low: int | None, high: int | None
) -> list[Moment]:
    if low is None or high is None or waiting[high] - waiting[low] < LEAST_FLOOD:
        return []
    return [Moment("flood", float(end[low]), float(end[high]), float(waiting[high] - waiting[low]))]
