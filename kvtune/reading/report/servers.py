"""Recordings of a running server beside each other: what differs in the traffic, and what in the server. Pure.

Their loads are never the same work, so each figure stands beside the other's, without a verdict. Requests of both logs
are paired by name; a class is what the client's log calls a request (`kind`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvtune.base.units import count, ms, number, percent
from kvtune.data.causes import cause_title
from kvtune.data.run.extras import ServerAccount
from kvtune.data.run.types import Run, hits_of
from kvtune.data.show.parts import Grid, grid
from kvtune.data.tally import Hits
from kvtune.reading.analysis.looks import Stretch, Waits, timeline
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


def servers(contrast: Contrast) -> Servers | None:
    """Return the recordings beside each other; None if not every side is one recording of a server."""
    runs = [side.run for side in contrast.sides]
    accounts = [run.header.extra.server for run in runs if run.header.source == "server"]
    measured = [account for account in accounts if account is not None]
    if len(measured) < len(runs) or contrast.repeated:
        return None
    timelines = [line.whole if (line := timeline(run)) is not None else None for run in runs]
    return Servers(
        tuple(side.name for side in contrast.sides),
        _traffic(runs, measured, timelines),
        _server(measured, timelines),
        _hits_by_class(runs),
        tuple(_pairs(runs[0], run) for run in runs[1:]),
    )


def _traffic(
    runs: Sequence[Run], accounts: Sequence[ServerAccount], timelines: Sequence[Stretch | None]
) -> tuple[Fact, ...]:
    seconds = [account.seconds for account in accounts]
    came = [
        part.came if part is not None and part.came is not None else account.requests
        for part, account in zip(timelines, accounts, strict=True)
    ]
    query = [account.query_tokens for account in accounts]
    seen = [account.seen if account.misses else None for account in accounts]
    named = [_classes(run) for run in runs]
    facts = [
        Fact("recorded", tuple(ms(1000 * s) for s in seconds), tuple(seconds)),
        _rates("requests a second", came, seconds),
        _rates("prompt tokens a second", query, seconds),
        _rates("prompt tokens a request", query, [float(account.requests) for account in accounts]),
        Fact(
            "prompt tokens seen before",
            tuple("–" if s is None else _range(*s) for s in seen),
            tuple(None if s is None or s[1] - s[0] > POINTS else s[0] for s in seen),
            share=True,
        ),
    ]
    for name in sorted({name for classes in named for name in classes}):
        whole = [sum(len(rows) for rows in classes.values()) for classes in named]
        own = [len(classes.get(name, ())) for classes in named]
        facts.append(_shares(f"requests of class {name}", own, whole))
    return tuple(facts)


def _server(accounts: Sequence[ServerAccount], timelines: Sequence[Stretch | None]) -> tuple[Fact, ...]:
    query = [account.query_tokens for account in accounts]
    facts = [_shares("hit", [account.hit_tokens for account in accounts], query)]
    for cause in dict.fromkeys(cause for account in accounts for cause in account.misses):
        tokens = [account.misses.get(cause, 0) if account.misses else None for account in accounts]
        facts.append(_shares(cause_title(cause), tokens, query))
    first = [Waits() if part is None else part.first_token for part in timelines]
    queue = [Waits() if part is None else part.queue for part in timelines]
    slowest = [waits.p99_ms for waits in first]
    facts += [
        _times("first token, mean", [waits.mean_ms for waits in first]),
        Fact(
            "first token, slowest of 100",
            tuple(bounds_text(bounds) or "–" for bounds in slowest),
            tuple(None if bounds is None else bounds.above for bounds in slowest),
        ),
        _times("in the queue, mean", [waits.mean_ms for waits in queue]),
        _counts("most running", [None if part is None else part.running for part in timelines]),
        _counts("most waiting", [None if part is None else part.waiting for part in timelines]),
        _counts("blocks evicted", [account.evicted_blocks for account in accounts]),
        _counts("preempted", [account.preemptions for account in accounts]),
        _times(
            "nothing generated while requests ran",
            [None if part is None or part.stalled_s is None else 1000 * part.stalled_s for part in timelines],
        ),
        _counts("restarts", [account.restarts for account in accounts]),
        _counts("looks without an answer", [None if part is None else part.lost for part in timelines]),
    ]
    return tuple(fact for fact in facts if any(value is not None for value in fact.values))


def _hits_by_class(runs: Sequence[Run]) -> tuple[Fact, ...]:
    named = [_classes(run) for run in runs]
    facts = []
    for name in sorted({name for classes in named for name in classes}):
        hits = []
        for run, classes in zip(runs, named, strict=True):
            requests, rows = run.table("requests"), classes.get(name, np.empty(0, dtype=np.intp))
            hits.append(hits_of(requests, rows))
        facts.append(_shares(name, [side.hit_tokens for side in hits], [side.query_tokens for side in hits]))
    return tuple(facts)


def _classes(run: Run) -> dict[str, Any]:
    """Return the rows of the requests of each class that the log names."""
    kinds = run.table("requests")["kind"]
    return {str(kind): np.flatnonzero(kinds == kind) for kind in np.unique(kinds) if kind != NO_CLASS}


def _pairs(first: Run, other: Run) -> Pairs | None:
    tables = [run.table("requests") for run in (first, other)]
    by_name = []
    for table in tables:
        names, rows, times = np.unique(table["id"], return_index=True, return_counts=True)
        by_name.append(
            {
                str(name): int(row)
                for name, row, often in zip(names, rows, times, strict=True)
                if often == 1 and table["hit_tokens"][row] >= 0 and not re.fullmatch(NO_NAME, str(name))
            }
        )
    shared = [name for name in by_name[0] if name in by_name[1]]
    if not shared:
        return None
    rows_of = [np.array([rows[name] for name in shared]) for rows in by_name]
    hits = [table["hit_tokens"][rows] for table, rows in zip(tables, rows_of, strict=True)]
    return Pairs(
        len(shared),
        (hits_of(tables[0], rows_of[0]), hits_of(tables[1], rows_of[1])),
        int((hits[1] > hits[0]).sum()),
        int((hits[1] < hits[0]).sum()),
    )


def _range(low: float, high: float) -> str:
    return percent(low) if high - low < 0.001 else f"{percent(low)} to {percent(high)}"


def _rates(name: str, parts: Sequence[float], wholes: Sequence[float]) -> Fact:
    values = [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]
    return Fact(name, tuple("–" if v is None else number(float(f"{v:.3g}")) for v in values), tuple(values))


def _shares(name: str, parts: Sequence[int | None], wholes: Sequence[int]) -> Fact:
    values = [
        part / whole if whole and part is not None else None
        for part, whole in zip(parts, wholes, strict=True)
    ]
    return Fact(name, tuple("–" if v is None else percent(v) for v in values), tuple(values), share=True)


def _times(name: str, values: Sequence[float | None]) -> Fact:
    return Fact(name, tuple("–" if v is None else ms(v) if v else "0 s" for v in values), tuple(values))


def _counts(name: str, values: Sequence[int | None]) -> Fact:
    return Fact(name, tuple("–" if v is None else count(v) for v in values), tuple(values))
