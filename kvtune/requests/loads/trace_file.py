"""A recorded trace as a workload: detects the format, checks the order, cuts out a window.

`trace_rows.py` reads the lines. Every error names the file and, where there is one, the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path

from kvtune.base.errors import UsageError
from kvtune.requests.loads.trace_rows import (
    AZURE,
    BURSTGPT,
    MOONCAKE_BLOCK,
    TRACE_TOKENS,
    Row,
    lines_of,
    mooncake_rows,
    not_read,
    recorded_by_kvtune,
    table_rows,
)
from kvtune.requests.log.opened import opened
from kvtune.requests.types import Draft, Request, Span

LOSS = (
    f"a recording of `kvtune serve` has shared prefixes to the block of {MOONCAKE_BLOCK} tokens and no answers: a "
    "replay of it hits fewer tokens than the server did. A log of requests (-w requests:path=LOG) is exact."
)
"""What a replay of kvtune's own recording lacks."""


Rows = Iterator[tuple[float, Row]]


def draft(rows: Rows, notes: Sequence[str], *, speed: float, concurrency: int) -> Draft:
    """Build the requests of a trace, `speed` times as fast.

    A recording of `kvtune serve` is put in order, as its lines are in the order in which requests finished.
    Times count from the trace's first request. With `concurrency`, arrivals are ignored: that many requests are in
    flight, in the trace's order. A hash id is a token stream, so equal ids are equal tokens; a prompt's partial last
    block is the first part of its stream. Prompts of formats without hashes share nothing.
    """
    planned: list[Request] = []
    for since, row in rows:
        prompt = _mooncake_prompt(row) if row.streams else (Span(len(planned), 0, row.prompt),)
        # Rounded, so that arrivals (and the workload's hash) do not depend on how the trace writes its times.
        arrival = None if concurrency else round(since / speed, 6)
        planned.append(
            Request(f"line-{row.line}", prompt, max(row.output, 1), arrival_s=arrival, kind="trace")
        )
    return Draft(planned, concurrency or None, note="; ".join(notes))


def window(
    file: Path, format: str, *, limit: int = 0, from_s: float = 0.0, to_s: float = 0.0, sort: bool = False
) -> tuple[Rows, list[str]]:
    """Return the requests from `from_s` to `to_s` with their seconds since then, and what the file does not give."""
    if to_s and to_s <= from_s:
        raise UsageError(
            f"workload trace: to={to_s:g} is not after from={from_s:g}", "give from= and to= in seconds"
        )
    head = _mooncake_head(file, format)
    own = recorded_by_kvtune(head)
    rows = _in_order(file, _rows(file, format), sort or own)
    return _window(file, rows, limit, from_s, to_s), [note for note in (own and LOSS, not_read(head)) if note]


def _window(file: Path, rows: Iterable[Row], limit: int, from_s: float, to_s: float) -> Rows:
    origin: float | None = None
    tokens = taken = 0
    for row in rows:
        if origin is None:
            origin = row.t_s
        since = row.t_s - origin
        if since < from_s:
            continue
        if to_s and since >= to_s:
            break
        tokens += row.prompt + row.output
        if tokens > TRACE_TOKENS:
            raise UsageError(
                f"{file}, line {row.line}: the requests up to here have more than {TRACE_TOKENS:,} tokens",
                "take a part of the trace: limit=, or from= and to=",
            )
        yield since - from_s, row
        taken += 1
        if limit and taken >= limit:
            return
    if not taken:
        what = f"{file} is empty" if origin is None else f"{file} has no request between from= and to="
        raise UsageError(what, "give a trace with at least one request, or a wider from= and to=")


# Span._make without its check, three times as fast: a trace has hundreds of thousands of spans.
_span: Callable[[tuple[int, int, int]], Span] = partial(tuple.__new__, Span)


def _mooncake_prompt(row: Row) -> tuple[Span, ...]:
    *full, last = row.streams
    tail = row.prompt - len(full) * MOONCAKE_BLOCK
    return (*map(_span, zip(full, repeat(0), repeat(MOONCAKE_BLOCK))), Span(last, 0, tail))


def _mooncake_head(file: Path, format: str) -> str:
    """Return the first line, "" of another format."""
    if format not in ("auto", "mooncake"):
        return ""
    with opened(file) as stream:
        return next(lines_of(file, stream), "").lstrip("\ufeff")


def _in_order(file: Path, rows: Iterable[Row], sort: bool) -> Iterator[Row]:
    if sort:
        yield from sorted(rows, key=lambda row: row.t_s)
        return
    before = float("-inf")
    for row in rows:
        if row.t_s < before:
            raise UsageError(
                f"{file}, line {row.line}: the timestamp is earlier than the line before it",
                "add sort=1 to put the requests in order",
            )
        before = row.t_s
        yield row


def _rows(file: Path, format: str) -> Iterator[Row]:
    """Yield a trace's rows. `format`: its name, or "auto" to tell it by the first line."""
    with opened(file) as stream:
        lines = lines_of(file, stream)
        head = next(lines, "").lstrip("\ufeff")
        kind = _detect(head, file) if format == "auto" else format
        if kind == "mooncake":
            yield from mooncake_rows(file, head, lines)
        else:
            yield from table_rows(file, head, lines, kind)


def _detect(head: str, file: Path) -> str:
    columns = {column.strip() for column in head.split(",")}
    if not head.strip() or head.lstrip().startswith("{"):
        return "mooncake"
    if columns.issuperset(BURSTGPT):
        return "burstgpt"
    if columns.issuperset(AZURE):
        return "azure"
    raise UsageError(
        f"{file}, line 1: neither a Mooncake line nor a BurstGPT or Azure header",
        "Mooncake is one JSON object a line; the CSV files begin with "
        f"{','.join(BURSTGPT)} or {','.join(AZURE)}",
    )
