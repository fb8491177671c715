"""A log of requests as a workload: common prefixes become common spans, exact to the token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from kvtune.base.errors import UsageError
from kvtune.requests.loads.sessions import cut
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.requests_log import Render, read_log
from kvtune.requests.log.token_ids import Prefixes, packed
from kvtune.requests.types import STREAM_ANSWER, Draft, Request, Span


def selected(
    file: Path, render: Render | None, *, limit: int = 0, since: float = 0.0, until: float = 0.0
) -> list[Logged]:
    """Read the requests of a log, sorted by the time at which they were sent if each has one."""
    rows: list[Logged] = []
    others = 0
    for row in read_log(file, render):
        if not within(row, since, until):
            others += 1
            continue
        rows.append(row)
        if limit and len(rows) >= limit:
            break
    if others and not rows:
        raise UsageError(
            f"{file} has {others:,} requests, and none was sent and answered between since={since:.12g} and "
            f"until={until:.12g}",
            "give the log that was written during the recording; times are seconds since 1970",
        )
    if not rows:
        raise UsageError(f"{file} is empty", "give a log with at least one request")
    if all(row.t0 is not None for row in rows):
        rows.sort(key=lambda row: row.t0 or 0.0)
    return rows


def draft(rows: Sequence[Logged], *, speed: float = 1.0, concurrency: int = 0) -> Draft:
    """Build the workload of these rows, sorted by the time at which they were sent if each has one.

    The requests are sent at their times, `speed` times as fast. With `concurrency`, times are ignored and that many
    requests are in flight; a log without times has 1 in flight.
    """
    timed = all(row.t0 is not None for row in rows)
    if timed:
        rows = sorted(rows, key=lambda row: row.t0 or 0.0)
    begun = rows[0].t0 or 0.0
    salts: dict[str, Prefixes[tuple[Span, ...]]] = {}
    replicas = numbered({row.replica for row in rows if row.replica})
    planned = []
    for index, row in enumerate(rows):
        tokens = packed(row.prompt)
        prefixes = salts.setdefault(row.salt, Prefixes())
        shared, spans = prefixes.longest(tokens)
        prompt = cut(spans or (), shared)
        if shared < len(row.prompt):
            prompt = (*prompt, Span(index, shared, len(row.prompt) - shared))
        answer = Span(STREAM_ANSWER + index, 0, len(row.answer))
        prefixes.add(tokens + packed(row.answer), (*prompt, *([answer] if row.answer else [])))
        arrival = round(((row.t0 or 0.0) - begun) / speed, 6) if timed and not concurrency else None
        planned.append(
            Request(
                row.name,
                prompt,
                max(1, row.output_tokens),
                arrival_s=arrival,
                kind="log",
                replica=replicas.get(row.replica, -1),
            )
        )
    return Draft(planned, concurrency or (None if timed else 1))


def numbered(names: Collection[str]) -> dict[str, int]:
    """Number the names of engines from 0 in their order, numbers by their value."""
    order = sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    return {name: number for number, name in enumerate(order)}


def within(row: Logged, since: float, until: float) -> bool:
    """Whether a request was sent at or after `since`, and answered by `until`; 0: no limit."""
    if not since and not until:
        return True
    return row.t0 is not None and row.t0 >= since and (not until or (row.t1 or row.t0) <= until)
