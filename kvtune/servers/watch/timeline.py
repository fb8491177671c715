"""What a server did between one look and the next, as rows of a recording: tables `looks`, `look_misses`, `look_times`.

In: each look's scrape and counts. Out: the tables. Pure. A recording of any length has at most MOST_ROWS rows: beyond
that neighbours become one row, whose counts are sums and whose gauges are the largest.

A look that failed is a gap: the next row covers it, and says how many looks were lost. What a server does not publish
is NaN, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from math import inf, isnan, nan

import numpy as np

from kvtune.data.run.types import Table, table_of, table_of_rows
from kvtune.servers.watch.counts import Counts
from kvtune.servers.watch.metrics import Scrape
from kvtune.servers.watch.totals import Mark

MOST_ROWS = 4096
"""34 minutes at two looks a second; eight hours are rows of 8 s."""
GAUGES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "pool_use": "kv_cache_usage_perc",
}
COUNTED = {
    "output_tokens": "generation_tokens",
    "answered": "request_success",
    "first_tokens": "time_to_first_token_seconds_count",
    "first_token_s": "time_to_first_token_seconds_sum",
    "queued": "request_queue_time_seconds_count",
    "queue_s": "request_queue_time_seconds_sum",
}
"""Columns, and the counters whose growth they are."""
TIMES = {"first_token": "time_to_first_token_seconds", "queue": "request_queue_time_seconds"}
"""Values of `look_times.what`, and the histograms that they are of."""

Bucket = tuple[str, float, float]
"""A name in TIMES; the bucket's bounds in seconds: above the first, up to the second (inf: no bound)."""


@dataclass(slots=True)
class Row:
    """From the look at `begin` to the one at `end`. `marks`: by server, the counts at these; of one alone, by ""."""

    begin: float
    end: float
    lost: int
    restarts: int
    gauges: dict[str, float]
    counts: dict[str, float]
    times: Counter[Bucket]
    marks: dict[str, tuple[Mark, Mark]]
    looks: int = 1

    def join(self, later: Row) -> None:
        """Add the row that follows."""
        self.end = later.end
        self.marks |= {
            url: (self.marks.get(url, (before, after))[0], after)
            for url, (before, after) in later.marks.items()
        }
        self.lost += later.lost
        self.restarts += later.restarts
        self.looks += later.looks
        self.gauges = {name: float(np.fmax(value, later.gauges[name])) for name, value in self.gauges.items()}
        self.counts = {name: value + later.counts[name] for name, value in self.counts.items()}
        self.times.update(later.times)

    def misses(self) -> dict[str, int]:
        """Return the misses by cause; those without a cause yet are `computing`."""
        misses: Counter[str] = Counter()
        for before, after in self.marks.values():
            causes = after.causes - before.causes
            misses += causes
            misses["computing"] += after.counts.misses - before.counts.misses - causes.total()
        return {cause: tokens for cause, tokens in misses.items() if tokens}

    @property
    def grown(self) -> Counts:
        """What the servers counted meanwhile."""
        return sum((after.counts - before.counts for before, after in self.marks.values()), Counts())


@dataclass
class Timeline:
    """The rows so far. `each`: looks that make one row. `newest`: of the last look; None if it made no row."""

    rows: list[Row] = field(default_factory=list)
    each: int = 1
    newest: Row | None = None
    _last: tuple[Scrape, Mark, int] | None = None
    _lost: int = 0

    def lose(self) -> None:
        """Count a look that failed."""
        self._lost += 1
        self.newest = None

    def add(self, scrape: Scrape, mark: Mark, restarts: int) -> None:
        """Add a look. `restarts`: the server's, up to now."""
        before, self._last = self._last, (scrape, mark, restarts)
        lost, self._lost = self._lost, 0
        self.newest = None
        if before is not None and before[0] is not scrape:
            self.newest = _row(before, self._last, lost)
            self.keep(copy(self.newest))

    def keep(self, row: Row) -> None:
        """Add a row, to the last one if that is of too few looks."""
        if self.rows and self.rows[-1].looks < self.each:
            self.rows[-1].join(row)
            return
        self.rows.append(row)
        if len(self.rows) > MOST_ROWS:
            self._halve()

    def _halve(self) -> None:
        self.each *= 2
        halved = self.rows[::2]
        for row, later in zip(halved, self.rows[1::2], strict=False):
            row.join(later)
        self.rows = halved

    def tables(self, begun: float) -> dict[str, Table]:
        """Return the tables, with times since `begun`."""
        rows = self.rows
        looks: dict[str, list[float]] = {
            "t_s": [row.begin - begun for row in rows],
            "until_s": [row.end - begun for row in rows],
            "lost": [row.lost for row in rows],
            "restarts": [row.restarts for row in rows],
            "preemptions": [row.grown.preemptions for row in rows],
            "evicted_blocks": [row.grown.evicted for row in rows],
            **{name: [row.gauges[name] for row in rows] for name in GAUGES},
            **{name: [row.counts[name] for row in rows] for name in (*COUNTED, *DERIVED)},
        }
        misses = [
            (index, cause, count)
            for index, row in enumerate(rows)
            for cause, count in sorted(row.misses().items())
        ]
        times = [
            (index, what, above, nan if upto == inf else upto, count)
            for index, row in enumerate(rows)
            for (what, above, upto), count in sorted(row.times.items())
        ]
        return {
            "looks": table_of("looks", looks),
            "look_misses": table_of_rows("look_misses", misses),
            "look_times": table_of_rows("look_times", times),
        }


def side_by_side(servers: Mapping[str, Row], begin: float, end: float) -> Row:
    """Return what several servers did between two looks at all of them. Of their pools it has the fullest."""
    rows = [*servers.values()]
    gauges = {name: float(sum(row.gauges[name] for row in rows)) for name in GAUGES}
    gauges["pool_use"] = max(
        (row.gauges["pool_use"] for row in rows), key=lambda use: -1.0 if isnan(use) else use
    )
    return Row(
        begin,
        end,
        sum(row.lost for row in rows),
        sum(row.restarts for row in rows),
        gauges,
        {name: sum(row.counts[name] for row in rows) for name in rows[0].counts},
        sum((row.times for row in rows), Counter()),
        {url: row.marks[""] for url, row in servers.items()},
    )


DERIVED = ("query_tokens", "hit_tokens", "came", "stalled_s")


def _row(before: tuple[Scrape, Mark, int], after: tuple[Scrape, Mark, int], lost: int) -> Row:
    (first, begin, restarts), (last, end, later) = before, after
    anew = later > restarts
    gauges = {name: _known(last.get(series)) for name, series in GAUGES.items()}
    old = {name: 0.0 if anew else _known(first.get(series)) for name, series in GAUGES.items()}
    counts = {}
    for name, series in COUNTED.items():
        now, begun = last.get(series), 0.0 if anew else (first.get(series) or 0.0)
        counts[name] = nan if now is None else max(0.0, now - begun)
    looked_up = last.get("prefix_cache_queries") is not None
    counts["query_tokens"] = end.counts.queries - begin.counts.queries if looked_up else nan
    counts["hit_tokens"] = end.counts.hits - begin.counts.hits if looked_up else nan
    counts["came"] = (
        counts["answered"] + gauges["running"] + gauges["waiting"] - old["running"] - old["waiting"]
    )
    still = counts["output_tokens"] == 0 and not anew and old["running"] > 0 and gauges["running"] > 0
    counts["stalled_s"] = last.at - first.at if still else 0.0
    if isnan(counts["output_tokens"] + old["running"] + gauges["running"]):
        counts["stalled_s"] = nan
    return Row(
        first.at,
        last.at,
        lost,
        later - restarts,
        gauges,
        counts,
        _times(first, last, anew),
        {"": (begin, end)},
    )


def _times(first: Scrape, last: Scrape, anew: bool) -> Counter[Bucket]:
    """Return the counts of the histograms' buckets between two scrapes."""
    counts: Counter[Bucket] = Counter()
    for what, series in TIMES.items():
        before = {} if anew else first.buckets.get(series, {})
        upto, below = last.buckets.get(series, {}), 0.0
        low = 0.0
        for bound in sorted(upto):
            grown = upto[bound] - before.get(bound, 0.0)
            if grown > below:
                counts[what, low, bound] = int(grown - below)
            low, below = bound, max(below, grown)
    return counts


def _known(value: float | None) -> float:
    return nan if value is None else value
