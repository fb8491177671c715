"""Recordings of a running server beside each other: what differs in the traffic, and what in the server. Pure.

Their loads are never the same work, so a recording is a side without a verdict: each figure of `TRAFFIC` and `SERVER`
stands beside the other's. Requests of both logs are paired by name; a class is what the client's log calls a request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.base.units import count, ms, number, percent, span
from kvtune.data.causes import cause_title
from kvtune.data.run.extras import ServerAccount
from kvtune.data.run.types import Run, hits_of
from kvtune.data.show.parts import Grid, grid
from kvtune.data.tally import Hits
from kvtune.reading.analysis.looks import timeline
from kvtune.reading.report.contrast import Contrast
from kvtune.reading.report.sections.over_time import bounds_text
from kvtune.requests.log.requests_log import NO_CLASS, NO_NAME

RELATIVE = 0.05
"""Smallest relative difference of a rate, a count or a time that the sentences name."""
POINTS = 0.01
"""Smallest difference of a share."""


class Fact(msgspec.Struct, frozen=True):
    """A figure of each recording as text and as a value; None: not known. `share`: the values are shares."""

    name: str
    texts: tuple[str, ...]
    values: tuple[float | None, ...]
    share: bool = False

    def differs(self, side: int) -> bool:
        """Whether recording `side` differs from the first by more than a trifle."""
        first, two = self.values[0], self.values[side]
        if first is None or two is None:
            return False
        return abs(two - first) >= (POINTS if self.share else RELATIVE * max(abs(first), abs(two), 1e-9))


class Pairs(msgspec.Struct, frozen=True):
    """Requests that the logs of the first and of another recording name alike, with known hits in both."""

    requests: int
    hits: tuple[Hits, Hits]
    more: int
    fewer: int

    @property
    def text(self) -> str:
        first, then = (percent(hits.rate) for hits in self.hits)
        return (
            f"{count(self.requests)} requests are in both logs, by name: {first} of their prompt tokens hit, "
            f"then {then}; {count(self.more)} requests hit more tokens, {count(self.fewer)} fewer."
        )


class Servers(msgspec.Struct, frozen=True):
    """`classes`: hits of the requests of each class. `pairs`: for each recording after the first; None: no names."""

    names: tuple[str, ...]
    traffic: tuple[Fact, ...]
    server: tuple[Fact, ...]
    classes: tuple[Fact, ...]
    pairs: tuple[Pairs | None, ...]

    def sentences(self, side: int) -> list[str]:
        """Return what differs between recording `side` and the first, in words."""
        made = []
        for title, facts in (("Traffic", self.traffic[1:]), ("Server", self.server)):
            moved = [f"{f.name} {f.texts[0]} -> {f.texts[side]}" for f in facts if f.differs(side)]
            made.append(f"{title}: {'; '.join(moved) or 'no difference'}.")
        pairs = self.pairs[side - 1]
        return [*made, *([pairs.text] if pairs is not None else [])]

    @property
    def tables(self) -> tuple[Grid, ...]:
        named = (("the traffic", self.traffic), ("the server", self.server), ("hits by class", self.classes))
        return tuple(
            grid((title, *self.names), [(fact.name, *fact.texts) for fact in facts], f"What differs: {title}")
            for title, facts in named
            if facts
        )


class FactUnit(NamedTuple):
    """How a figure is written, and the value that it is compared by."""

    text: Callable[[Any], str]
    value: Callable[[Any], float | None] = lambda figure: figure
    share: bool = False


class Row(NamedTuple):
    """A figure of a recording: its place in `_figures`, and its unit."""

    title: str
    path: tuple[str, ...]
    unit: FactUnit


def _range(ends: tuple[float, float]) -> str:
    return span(*map(percent, ends))


def _time(value_ms: float) -> str:
    return ms(value_ms) if value_ms else "0 s"


COUNT, TIME, SHARE = FactUnit(count), FactUnit(_time), FactUnit(percent, share=True)
RATE = FactUnit(lambda rate: number(float(f"{rate:.3g}")))
LENGTH = FactUnit(lambda seconds: ms(1000 * seconds))
PAUSE = FactUnit(lambda seconds: _time(1000 * seconds), lambda seconds: 1000 * seconds)
RANGE = FactUnit(_range, lambda ends: None if ends[1] - ends[0] > POINTS else ends[0], share=True)
BUCKET = FactUnit(bounds_text, lambda bounds: bounds.above)

TRAFFIC = (
    Row("recorded", ("account", "seconds"), LENGTH),
    Row("requests a second", ("requests_s",), RATE),
    Row("prompt tokens a second", ("prompt_tok_s",), RATE),
    Row("prompt tokens a request", ("prompt_tokens",), RATE),
    Row("prompt tokens seen before", ("seen",), RANGE),
)
HITS = Row("hit", ("account", "rate"), SHARE)
SERVER = (
    Row("first token, mean", ("whole", "first_token", "mean_ms"), TIME),
    Row("first token, slowest of 100", ("whole", "first_token", "p99_ms"), BUCKET),
    Row("in the queue, mean", ("whole", "queue", "mean_ms"), TIME),
    Row("most running", ("whole", "running"), COUNT),
    Row("most waiting", ("whole", "waiting"), COUNT),
    Row("blocks evicted", ("account", "evicted_blocks"), COUNT),
    Row("preempted", ("account", "preemptions"), COUNT),
    Row("nothing generated while requests ran", ("whole", "stalled_s"), PAUSE),
    Row("restarts", ("account", "restarts"), COUNT),
    Row("looks without an answer", ("whole", "lost"), COUNT),
)


def servers(contrast: Contrast) -> Servers | None:
    """Return the recordings beside each other; None if not every side is one recording of a server."""
    runs = [side.run for side in contrast.sides]
    accounts = [run.header.extra.server for run in runs if run.header.source == "server"]
    measured = [account for account in accounts if account is not None]
    if len(measured) < len(runs) or contrast.repeated:
        return None
    causes = list(dict.fromkeys(cause for account in measured for cause in account.misses))
    kinds = {str(kind) for run in runs for kind in np.unique(run.table("requests")["kind"])}
    classes = sorted(kinds - {NO_CLASS})
    sides = [_figures(run, account, causes, classes) for run, account in zip(runs, measured, strict=True)]
    traffic = (*TRAFFIC, *(Row(f"requests of class {name}", ("requests", name), SHARE) for name in classes))
    missed = (Row(cause_title(cause), ("missed", cause), SHARE) for cause in causes)
    server = [_fact(row, sides) for row in (HITS, *missed, *SERVER)]
    return Servers(
        names=tuple(side.name for side in contrast.sides),
        traffic=tuple(_fact(row, sides) for row in traffic),
        server=tuple(fact for fact in server if any(value is not None for value in fact.values)),
        classes=tuple(_fact(Row(name, ("hits", name), SHARE), sides) for name in classes),
        pairs=tuple(_pairs(runs[0], run) for run in runs[1:]),
    )


def _fact(row: Row, sides: Iterable[object]) -> Fact:
    figures = [reduce(_inside, row.path, side) for side in sides]
    texts = tuple("–" if figure is None else row.unit.text(figure) for figure in figures)
    values = tuple(None if figure is None else row.unit.value(figure) for figure in figures)
    return Fact(row.title, texts, values, row.unit.share)


def _inside(whole: Any, name: str) -> Any:
    if isinstance(whole, dict):
        return whole[name]
    return None if whole is None else getattr(whole, name)


def _figures(
    run: Run, account: ServerAccount, causes: Iterable[str], classes: Iterable[str]
) -> dict[str, Any]:
    """Return what a recording says; None: it does not tell. `whole`: in all looks."""
    timed, requests, query = timeline(run), run.table("requests"), account.query_tokens
    whole = None if timed is None else timed.whole
    came = account.requests if whole is None or whole.came is None else whole.came
    rows = {name: np.flatnonzero(requests["kind"] == name) for name in classes}
    misses, classed = account.misses, sum(map(len, rows.values()))
    return {
        "account": account,
        "whole": whole,
        "requests_s": _ratio(came, account.seconds),
        "prompt_tok_s": _ratio(query, account.seconds),
        "prompt_tokens": _ratio(query, account.requests),
        "seen": account.seen if misses else None,
        "missed": {cause: _ratio(misses.get(cause, 0), query) for cause in causes} if misses else None,
        "requests": {name: _ratio(len(places), classed) for name, places in rows.items()},
        "hits": {name: hits_of(requests, places).rate for name, places in rows.items()},
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _pairs(first: Run, other: Run) -> Pairs | None:
    tables = [run.table("requests") for run in (first, other)]
    by_name = [_named(table["id"], table["hit_tokens"]) for table in tables]
    shared = [name for name in by_name[0] if name in by_name[1]]
    if not shared:
        return None
    rows = [np.array([places[name] for name in shared]) for places in by_name]
    before, after = (table["hit_tokens"][places] for table, places in zip(tables, rows, strict=True))
    hits = (hits_of(tables[0], rows[0]), hits_of(tables[1], rows[1]))
    return Pairs(len(shared), hits, int((after > before).sum()), int((after < before).sum()))


def _named(ids: NDArray[Any], hits: NDArray[Any]) -> dict[str, int]:
    """Return the rows of the requests that a log names, each by another name, and whose hits are known."""
    names, rows, times = np.unique(ids, return_index=True, return_counts=True)
    return {
        str(name): int(row)
        for name, row, often in zip(names, rows, times, strict=True)
        if often == 1 and hits[row] >= 0 and not re.fullmatch(NO_NAME, str(name))
    }
