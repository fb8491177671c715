"""The run file: a zip of `header.json` and one .npy array per table column. Written whole or not at all.

Readable with any zip tool and numpy. Nothing in it is executed (no pickle).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.base.bounded import Budget, decode_json_as
from kvtune.base.commands import command
from kvtune.base.errors import TooLargeError, UsageError, reason
from kvtune.base.files import creating, explained, open_regular, real, replacing
from kvtune.base.masking import masked_text, masked_value, without_secrets
from kvtune.data.run.columns import check_table, check_tables, read_column
from kvtune.data.run.extras import TextAccount, faults_of, read_extras
from kvtune.data.run.known import check_known
from kvtune.data.run.types import MAY_BE_NAN, SCHEMA, TABLES, Header, Run, RunLabel, Table, empty_table

SUFFIX = ".kvrun"
HEADER = "header.json"

# Limits on a file's unpacked size. Eight hours at 100 steps and 6,000 tokens a second make tables of about 5 GB, which
# zip compresses to a half or a quarter. The largest headers have `explain`'s verdict on each request.
MOST_BYTES = 16 << 30
MOST_HEADER_BYTES = 64 << 20
LIMITS = Budget(MOST_HEADER_BYTES, 800 << 20)
MOST_RATIO = 100
FREE_BYTES = 16 << 20  # any file may unpack to this size: columns of zeros compress by more than MOST_RATIO
MOST_LIST_BYTES = 1 << 20  # of the zip's list of parts: a run has about a hundred
MOST_LISTED_BYTES = 64 << 20  # columns that `kvtune runs` reads for its figures: two million requests

ENCRYPTED = 1
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    KeyError,
    ValueError,
    EOFError,
    OSError,
    NotImplementedError,
    OverflowError,
)
"""What zipfile, msgspec and numpy raise for damaged and hostile files, except MemoryError and RecursionError."""

Decoded = dict[str, Any]
"""A header as JSON, before its types are checked."""

# Old schema -> function that upgrades a decoded header by one version.
UPGRADES: dict[int, Callable[[Decoded], Decoded]] = {}


BREAKS = re.compile(rb"\\\\[nrfu]|\xc2\x85|\xe2\x80[\xa8\xa9]")
"""What may break a line in a header's JSON."""
AS_THEY_ARE = ("args", "command", "texts")
"""Fields whose line breaks count: words of command lines, quoted where they are shown, and texts of prompts."""


class _Schema(msgspec.Struct):
    schema: int = 0


def write_run(run: Run, path: Path, *, new: bool = False, level: int = 6) -> None:
    """Write `run` to `path`, whole or not at all. With `new`, do not replace an existing file. `level`: zlib's.

    Only this user can read a run that is `private`.
    """
    hint = "free space or choose another folder with -o DIR"
    with (
        explained(path, hint, "the run file"),
        (creating if new else replacing)(path, private=run.private) as part,
        zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as out,
    ):
        out.writestr(HEADER, _json(_masked(run.header)))
        for name, table in run.tables.items():
            for column, kind in TABLES[name].items():
                if column not in table:  # the reader fills in columns that the writer does not know
                    continue
                buffer = io.BytesIO()
                array = np.asarray(table[column], dtype=None if kind == "U" else kind)
                np.save(buffer, array, allow_pickle=False)
                out.writestr(_name(name, column), buffer.getvalue())


def read_run(path: Path) -> Run:
    """Read a run file of this or any older schema."""
    with _readable(path), _archive(path) as archive:
        header, tables = _header(_part(archive, HEADER), path), _tables(archive)
        check_tables(tables)
        return Run(header, tables)


def read_label(path: Path) -> RunLabel:
    """Read the header fields that lists of runs need. The time does not depend on the size of the tables."""
    with _readable(path), _archive(path) as archive:
        raw = _part(archive, HEADER)
        if decode_json_as(raw, _Schema, LIMITS).schema == SCHEMA:
            return decode_json_as(raw, RunLabel, LIMITS)
        return msgspec.convert(_upgraded(_decoded(raw), path), RunLabel)


def read_columns(path: Path, table: str, columns: Sequence[str]) -> Table:
    """Read columns of one table. No rows if the file lacks them, or if they are too large for a list of runs."""
    with _readable(path), _archive(path) as archive:
        wanted = {_name(table, column) for column in columns}
        if sum(info.file_size for info in archive.infolist() if info.filename in wanted) > MOST_LISTED_BYTES:
            return {column: empty_table(table)[column] for column in columns}
        return _columns(archive, table, columns)


def store_extra(path: Path, **changes: object) -> None:
    """Replace these fields of `header.extra` in a run file; keep everything else, also unknown fields and permissions.

    If `path` is a link, write the file that it points to.
    """
    hint = "free space, or copy the file to a folder that you may write to"
    texts = changes.get("texts")
    target = real(path)
    with _readable(path), _archive(path) as archive:
        header = _upgraded(_decoded(_part(archive, HEADER)), path)
        kept = header.get("extra")
        header["extra"] = (kept if isinstance(kept, dict) else {}) | {
            name: msgspec.to_builtins(value) for name, value in changes.items()
        }
        parts = [
            (info, _part(archive, info.filename)) for info in archive.infolist() if info.filename != HEADER
        ]
    with (
        explained(path, hint, "the run file"),
        replacing(target, private=isinstance(texts, TextAccount) and texts.with_text) as part,
        zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out,
    ):
        out.writestr(HEADER, _json(header))
        for info, content in parts:
            out.writestr(info, content)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        hint = "`kvtune runs` lists those in the output folder"
        if ":/" in str(path):  # a server's address, as a path
            hint = "a server is recorded first: `kvtune record URL -o RUN`; `kvtune watch URL` shows it live"
        raise UsageError(f"no run file {path}", hint) from error
    except IsADirectoryError as error:
        raise UsageError(
            f"{path} is a folder, not a run file",
            f"`{command('runs', str(path))}` lists the run files in it",
        ) from error
    except TooLargeError as error:
        raise UsageError(f"{path} is not a readable run file: {error.message}", error.hint) from error
    except (MemoryError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a readable run file: it is nested too deeply or too large for this machine's memory",
            f"give a {SUFFIX} file that kvtune wrote",
        ) from error
    except DAMAGE as error:
        raise UsageError(
            f"{path} is not a readable run file: {reason(error)}",
            f"give a {SUFFIX} file that kvtune wrote",
        ) from error


class _Listing(io.BufferedReader):
    """A file that zipfile opens: it reads the zip's list of parts at once, however long the zip says that it is."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(io.FileIO(file.fileno(), closefd=False))
        self.most = MOST_LIST_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self.most:
            raise ValueError("its list of parts is longer than any run's")
        return super().read(size)


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a run file. ValueError if the sizes that its zip declares are too large to decompress."""
    with open_regular(path) as file, zipfile.ZipFile(listing := _Listing(file)) as archive:
        listing.most = sys.maxsize
        infos = archive.infolist()
        if len({info.filename for info in infos}) < len(infos):
            raise ValueError("two of its parts have one name")
        total = sum(info.file_size for info in infos)
        allowed = min(MOST_BYTES, max(FREE_BYTES, MOST_RATIO * os.fstat(file.fileno()).st_size))
        if total > allowed:
            raise ValueError(f"it would be {total:,} bytes unpacked, which no run of its size is")
        for info in infos:
            if info.filename == HEADER and info.file_size > MOST_HEADER_BYTES:
                raise ValueError(f"its header would be {info.file_size:,} bytes, which no run's is")
            if info.flag_bits & ENCRYPTED or info.compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):
                raise ValueError(
                    f"its part {info.filename} is encrypted or packed in a way that kvtune does not use"
                )
        yield archive


def _part(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a whole part, but decompress no more than its declared size. ValueError if its size is another."""
    info = archive.getinfo(name)
    with archive.open(info) as member:
        content = member.read(info.file_size)
        if len(content) != info.file_size or member.read(1):
            raise ValueError(f"its part {name} is cut short")
    return content


def _masked(header: Header) -> Header:
    """Return the header without secrets in its command, flags, settings, notes and log, whoever filled them in."""
    return msgspec.structs.replace(
        header,
        command=without_secrets(header.command),
        engine=msgspec.structs.replace(
            header.engine,
            args=without_secrets(header.engine.args),
            settings=masked_value(header.engine.settings, fields=True),
        ),
        why=masked_text(header.why),
        notes=masked_value(header.notes),
        log_tail=masked_text("\n".join(header.log_tail)).split("\n") if header.log_tail else [],
    )


def _json(header: object) -> bytes:
    try:
        raw = msgspec.json.encode(header)
    except UnicodeEncodeError:  # half a character, of a file name that is no UTF-8
        raw = msgspec.json.encode(_whole(msgspec.to_builtins(header)))
    return msgspec.json.format(raw, indent=1)


def _whole(value: Any) -> Any:
    """Return the value with U+FFFD for each half of a character."""
    if isinstance(value, str):
        return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in value)
    if isinstance(value, dict):
        return {_whole(name): _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


def _header(raw: bytes, path: Path) -> Header:
    decoded = _upgraded(_decoded(raw), path)
    if BREAKS.search(raw):
        decoded = _in_lines(decoded)
    check_known(decoded)
    stored = decoded.pop("extra", None)
    header = msgspec.convert(decoded, Header)
    return msgspec.structs.replace(
        header, extra=read_extras(stored), notes=[*header.notes, *faults_of(stored)]
    )


def _in_lines(value: Any) -> Any:
    """Return the value with each of its texts on one line, so that none begins a line that looks like kvtune's."""
    if isinstance(value, str):
        return " ".join(value.splitlines())
    if isinstance(value, dict):
        return {key: inner if key in AS_THEY_ARE else _in_lines(inner) for key, inner in value.items()}
    return [_in_lines(inner) for inner in value] if isinstance(value, list) else value


def _decoded(raw: bytes) -> object:
    return decode_json_as(raw, object, LIMITS)


def _upgraded(decoded: object, path: Path) -> Decoded:
    """Return the decoded header, upgraded from its schema to SCHEMA."""
    if not isinstance(decoded, dict):
        raise ValueError("its header is no JSON object")
    schema = decoded.get("schema", 0)
    if not isinstance(schema, int):
        raise ValueError("its schema is no number")
    if schema > SCHEMA:
        raise UsageError(
            f"{path} has schema {schema}; this kvtune reads up to {SCHEMA}",
            "upgrade kvtune to read this file",
        )
    while schema < SCHEMA:
        if schema not in UPGRADES:
            raise UsageError(
                f"{path} has unknown schema {schema}", f"this kvtune reads schemas 1 to {SCHEMA}"
            )
        decoded = UPGRADES[schema](decoded)
        schema += 1
    decoded["schema"] = SCHEMA
    return decoded


def _name(table: str, column: str) -> str:
    return f"tables/{table}/{column}.npy"


def _tables(archive: zipfile.ZipFile) -> dict[str, Table]:
    """Read every known table of which the file has at least one column."""
    names = set(archive.namelist())
    return {
        table: _columns(archive, table, tuple(columns))
        for table, columns in TABLES.items()
        if any(_name(table, column) in names for column in columns)
    }


def _columns(archive: zipfile.ZipFile, table: str, columns: Sequence[str]) -> Table:
    """Read a table's columns; one that an older kvtune did not write is filled with zeros, NaN or empty text."""
    names = set(archive.namelist())
    read = {
        column: read_column(_part(archive, _name(table, column)), table, column)
        for column in columns
        if _name(table, column) in names
    }
    check_table(table, read)
    rows = len(next(iter(read.values()), ()))
    return {column: read[column] if column in read else _filled(table, column, rows) for column in columns}


def _filled(table: str, column: str, rows: int) -> NDArray[Any]:
    kind = TABLES[table][column]
    if kind != "f8":
        return np.zeros(rows, dtype="U1" if kind == "U" else kind)
    if (table, column) not in MAY_BE_NAN:
        raise ValueError(f"it lacks {table}.{column}")
    return np.full(rows, np.nan)
