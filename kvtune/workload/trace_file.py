"""Readers of recorded traces: Mooncake JSONL (with prefix hashes), BurstGPT CSV and Azure CSV (without).

Each reader streams a file line by line into `Row`s; `trace` turns rows into a Plan. Every complaint names the
file and the line.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec

from kvtune.errors import UsageError
from kvtune.workload.plan import Plan
from kvtune.workload.types import Request, Span

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

FORMATS = ("auto", "mooncake", "burstgpt", "azure")

_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Row(NamedTuple):
    """One request of a trace. `streams` is empty where the format knows no prefixes."""

    line: int
    t_s: float
    prompt: int
    output: int
    streams: list[int]


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]]


def trace(
    *,
    path: str,
    limit: int,
    speed: float,
    from_s: float,
    to_s: float,
    format: str,
    sort: int,
    concurrency: int,
    seed: int,
) -> Plan:
    """The requests of a trace file that came between `from_s` and `to_s` (0: no end), `speed` times as fast.

    Times count from the trace's first request. With `concurrency` the arrivals are dropped: that many in
    flight, in the trace's order. A hash id is a token stream, so equal ids are equal tokens; a prompt's last,
    partial block is the leading part of its stream. Prompts of formats without hashes share nothing. `seed`
    changes tokens only.
    """
    if to_s and to_s <= from_s:
        raise UsageError(
            f"workload trace: to={to_s:g} is not after from={from_s:g}", "give from= and to= in seconds"
        )
    file = Path(path).expanduser()
    rows = _in_order(file, _rows(file, format), bool(sort))
    planned: list[Request] = []
    origin: float | None = None
    for row in rows:
        if origin is None:
            origin = row.t_s
        since = row.t_s - origin
        if since < from_s:
            continue
        if to_s and since >= to_s:
            break
        prompt = _mooncake_prompt(row) if row.streams else (Span(len(planned), 0, row.prompt),)
        # Rounded so that a trace gives the same arrivals (and hash) however its times are spelled.
        arrival = None if concurrency else round((since - from_s) / speed, 6)
        planned.append(
            Request(f"line-{row.line}", prompt, max(row.output, 1), arrival_s=arrival, kind="trace")
        )
        if limit and len(planned) >= limit:
            break
    if not planned:
        what = f"{file} is empty" if origin is None else f"{file} has no request between from= and to="
        raise UsageError(what, "give a trace with at least one request, or a wider from= and to=")
    return Plan(planned, concurrency or None)


# Span._make without its check, three times as fast: a trace has hundreds of thousands of spans.
_span: Callable[[tuple[int, int, int]], Span] = partial(tuple.__new__, Span)


def _mooncake_prompt(row: Row) -> tuple[Span, ...]:
    *full, last = row.streams
    tail = row.prompt - len(full) * MOONCAKE_BLOCK
    return (*map(_span, zip(full, repeat(0), repeat(MOONCAKE_BLOCK))), Span(last, 0, tail))


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
    with _opened(file) as stream:
        head = stream.readline().lstrip("\ufeff")
        known = _detect(head, file) if format == "auto" else format
        if known == "mooncake":
            yield from _mooncake(file, head, stream)
        else:
            yield from _table(file, head, stream, known)


@contextmanager
def _opened(file: Path) -> Iterator[IO[str]]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            yield stream
    except FileNotFoundError as error:
        raise UsageError(f"no trace file {file}", "check path= in the workload") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not a text file: {error.reason}", "unpack it first if it is packed"
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot read the trace file {file}: {error.strerror or error}", "check path= in the workload"
        ) from error


def _detect(head: str, file: Path) -> str:
    columns = {column.strip() for column in head.split(",")}
    if not head.strip() or head.lstrip().startswith("{"):
        return "mooncake"
    if columns.issuperset(_BURSTGPT):
        return "burstgpt"
    if columns.issuperset(_AZURE):
        return "azure"
    raise UsageError(
        f"{file}, line 1: neither a Mooncake line nor a BurstGPT or Azure header",
        "Mooncake is one JSON object a line; the CSV files begin with "
        f"{','.join(_BURSTGPT)} or {','.join(_AZURE)}",
    )


def _mooncake(file: Path, head: str, rest: Iterable[str]) -> Iterator[Row]:
    decode = msgspec.json.Decoder(_MooncakeLine, strict=True).decode
    number = 0
    for lines in ((head,), rest):
        for text in lines:
            number += 1
            if text.isspace() or not text:
                continue
            try:
                line = decode(text)
            except msgspec.ValidationError as error:
                raise UsageError(
                    f"{file}, line {number}: {error}",
                    "a line is {timestamp (ms), input_length, output_length (tokens), hash_ids}",
                ) from error
            except msgspec.DecodeError as error:
                raise UsageError(
                    f"{file}, line {number}: not JSON: {error}", "repair or remove the line"
                ) from error
            blocks = -(-line.input_length // MOONCAKE_BLOCK)
            if len(line.hash_ids) != blocks:
                raise UsageError(
                    f"{file}, line {number}: {len(line.hash_ids)} hash_ids for input_length "
                    f"{line.input_length}, which has {blocks} blocks of {MOONCAKE_BLOCK}",
                    "hash_ids holds one id for each started block of the prompt",
                )
            yield Row(number, line.timestamp / 1000.0, line.input_length, line.output_length, line.hash_ids)


def _table(file: Path, head: str, rest: Iterable[str], known: str) -> Iterator[Row]:
    names = [column.strip() for column in head.split(",")]
    wanted = _BURSTGPT if known == "burstgpt" else _AZURE
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UsageError(
            f"{file}, line 1: no column {missing[0]!r}", f"a {known} file has the columns {', '.join(wanted)}"
        )
    time_at, prompt_at, output_at = (names.index(name) for name in wanted)
    reader = csv.reader(rest)
    for cells in reader:
        number = reader.line_num + 1
        if not cells:
            continue
        if len(cells) != len(names):
            raise UsageError(
                f"{file}, line {number}: {len(cells)} cells, the header has {len(names)}", "repair the line"
            )
        t_s = _seconds(cells[time_at], known, file, number)
        prompt = _length(cells[prompt_at], wanted[1], file, number)
        output = _length(cells[output_at], wanted[2], file, number)
        if known == "burstgpt" and output == 0:
            continue  # the data set's own mark of a request that failed
        if prompt == 0:
            raise UsageError(f"{file}, line {number}: {wanted[1]} is 0", "remove requests without a prompt")
        yield Row(number, t_s, prompt, output, [])


def _seconds(text: str, known: str, file: Path, number: int) -> float:
    try:
        if known == "burstgpt":
            value = float(text)
            if not 0 <= value < float("inf"):
                raise ValueError
            return value
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        kind = "a number of seconds" if known == "burstgpt" else "a date and time"
        raise UsageError(
            f"{file}, line {number}: timestamp {text!r} is not {kind}", "repair the line"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _length(text: str, column: str, file: Path, number: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise UsageError(
            f"{file}, line {number}: {column} {text!r} is not a whole number", "repair the line"
        ) from error
    if value < 0:
        raise UsageError(
            f"{file}, line {number}: {column} is negative ({value})", "repair or remove the line"
        )
    return value
