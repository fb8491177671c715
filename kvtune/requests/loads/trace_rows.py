"""Reads the lines of Mooncake, BurstGPT and Azure traces; every error names file and line.

Mooncake JSONL has prefix hashes, BurstGPT and Azure CSV have none. Lines are read and checked one by one.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec

from kvtune.base.bounded import BeyondError, decode_json, decode_json_as
from kvtune.base.errors import UsageError, reason

MOONCAKE_BLOCK = 512
"""Tokens of one hash id in a Mooncake trace."""

# Limits of a trace. No model's context is near MOST_TOKENS; a prompt of that many tokens is a line of 700,000
# characters in Mooncake's format. A fast GPU prefills TRACE_TOKENS in a day.
MOST_TOKENS = 1 << 24
MOST_LINE = 4 << 20
MOST_REQUESTS = 20_000_000
TRACE_TOKENS = 1 << 32
LAST_SECOND = 1e12

BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Row(NamedTuple):
    """One request of a trace: its arrival `t_s`, its tokens. `streams` is empty for formats without prefix hashes."""

    line: int
    t_s: float
    prompt: int
    output: int
    streams: list[int]


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1000 * LAST_SECOND)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]]
    by: str = ""


READ = _MooncakeLine.__struct_fields__
SHOWN = 5
"""Names of fields that one note holds."""


def invalid(content: str | bytes, wanted: type, error: ValueError) -> str:
    """Return what is wrong with JSON that msgspec refused: also which field has a NaN, which Python writes as JSON."""
    if isinstance(error, msgspec.ValidationError | BeyondError):
        return reason(error)
    try:
        msgspec.convert(decode_json(content), wanted)
    except msgspec.ValidationError as nan_error:
        return reason(nan_error)
    except ValueError:
        pass
    return f"not JSON: {reason(error)}"


def lines_of(file: Path, stream: IO[str]) -> Iterator[str]:
    """Yield the lines of a trace. UsageError for a line of 4 Mi characters, or more than 20 million lines."""
    for number in range(1, MOST_REQUESTS + 1):
        line = stream.readline(MOST_LINE)
        if not line:
            return
        if len(line) == MOST_LINE:
            raise UsageError(
                f"{file}, line {number}: longer than {MOST_LINE:,} characters",
                "a request is one line of a trace",
            )
        yield line
    raise UsageError(f"{file}, line {number + 1}: more requests than {MOST_REQUESTS:,}", "cut the trace")


def recorded_by_kvtune(head: str) -> bool:
    """Whether the first line of a trace is one of `kvtune serve --record`."""
    try:
        return decode_json_as(head, _MooncakeLine).by == "kvtune"
    except ValueError:
        return False


def not_read(head: str) -> str:
    """Return, in words, the fields of a Mooncake trace's first line that are not read; "" if there are none."""
    try:
        names = sorted(set(decode_json_as(head, dict[str, msgspec.Raw])) - set(READ))
    except ValueError:
        return ""
    shown = ", ".join(f"{name!a:.40}" for name in names[:SHOWN])
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"not read of its lines: {shown}{more}" if names else ""


def mooncake_rows(file: Path, head: str, rest: Iterable[str]) -> Iterator[Row]:
    number = 0
    for lines in ((head,), rest):
        for text in lines:
            number += 1
            if text.isspace() or not text:
                continue
            try:
                line = decode_json_as(text, _MooncakeLine)
            except ValueError as error:
                raise UsageError(
                    f"{file}, line {number}: {invalid(text, _MooncakeLine, error)}",
                    "repair or remove the line: it is {timestamp (ms), input_length, output_length (tokens), hash_ids}",
                ) from error
            blocks = -(-line.input_length // MOONCAKE_BLOCK)
            if len(line.hash_ids) != blocks:
                raise UsageError(
                    f"{file}, line {number}: {len(line.hash_ids)} hash_ids for input_length "
                    f"{line.input_length}, which has {blocks} blocks of {MOONCAKE_BLOCK}",
                    "hash_ids needs one id for each started block of the prompt",
                )
            yield Row(number, line.timestamp / 1000.0, line.input_length, line.output_length, line.hash_ids)


def table_rows(file: Path, head: str, rest: Iterable[str], format_name: str) -> Iterator[Row]:
    names = [column.strip() for column in head.split(",")]
    wanted = BURSTGPT if format_name == "burstgpt" else AZURE
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UsageError(
            f"{file}, line 1: no column {missing[0]!r}",
            f"a {format_name} file has the columns {', '.join(wanted)}",
        )
    time_at, prompt_at, output_at = (names.index(name) for name in wanted)
    number = 1
    for line in rest:  # each line gets its own csv.reader: an open quote would join all lines after it
        number += 1
        try:
            cells = next(csv.reader((line,)), None)
        except csv.Error as error:
            raise UsageError(f"{file}, line {number}: not CSV: {reason(error)}", "repair the line") from error
        if not cells:
            continue
        if len(cells) != len(names):
            raise UsageError(
                f"{file}, line {number}: {len(cells)} cells, the header has {len(names)}", "repair the line"
            )
        t_s = _seconds(cells[time_at], format_name, file, number)
        prompt = _length(cells[prompt_at], wanted[1], file, number)
        output = _length(cells[output_at], wanted[2], file, number)
        if format_name == "burstgpt" and output == 0:
            continue  # the data set marks failed requests this way
        if prompt == 0:
            raise UsageError(f"{file}, line {number}: {wanted[1]} is 0", "remove requests without a prompt")
        yield Row(number, t_s, prompt, output, [])


def _seconds(text: str, format_name: str, file: Path, number: int) -> float:
    try:
        if format_name == "burstgpt":
            value = float(text)
            if not 0 <= value <= LAST_SECOND:
                raise ValueError
            return value
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        kind = "a number of seconds" if format_name == "burstgpt" else "a date and time"
        raise UsageError(
            f"{file}, line {number}: timestamp {text[:40]!r} is not {kind}", "repair the line"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _length(text: str, column: str, file: Path, number: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise UsageError(
            f"{file}, line {number}: {column} {text[:40]!r} is not a whole number", "repair the line"
        ) from error
    if value > MOST_TOKENS:
        raise UsageError(
            f"{file}, line {number}: {column} is above {MOST_TOKENS:,} ({text[:40]})",
            "repair or remove the line",
        )
    if value < 0:
        raise UsageError(
            f"{file}, line {number}: {column} is negative ({value})", "repair or remove the line"
        )
    return value
