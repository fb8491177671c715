"""The run file: a zip of `header.json` and one .npy array per table column. Written whole or not at all.

Readable with any zip tool and numpy. Nothing in it is executed (no pickle).
"""

from __future__ import annotations

import contextlib
import io
import shlex
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtune.errors import UsageError
from kvtune.files import explained, replacing
from kvtune.run.extras import read_extras
from kvtune.run.types import SCHEMA, TABLES, Header, Run, Table, empty_table

SUFFIX = ".kvrun"

Decoded = dict[str, Any]
"""A header as JSON, before its types are checked."""

# Old schema -> function that upgrades a decoded header by one version.
UPGRADES: dict[int, Callable[[Decoded], Decoded]] = {}


def write_run(run: Run, path: Path) -> None:
    """Write `run` to `path`, whole or not at all."""
    hint = "free space or choose another folder with -o DIR"
    with (
        explained(path, hint, "the run file"),
        replacing(path) as part,
        zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out,
    ):
        out.writestr("header.json", msgspec.json.format(msgspec.json.encode(run.header), indent=1))
        for name, table in run.tables.items():
            for column, kind in TABLES[name].items():
                if column not in table:  # the reader fills in columns that the writer does not know
                    continue
                buffer = io.BytesIO()
                array = np.asarray(table[column], dtype=None if kind == "U" else kind)
                np.save(buffer, array, allow_pickle=False)
                out.writestr(f"tables/{name}/{column}.npy", buffer.getvalue())


def read_run(path: Path) -> Run:
    """Read a run file of this or any older schema."""
    with _readable(path), zipfile.ZipFile(path) as archive:
        return Run(_header(archive.read("header.json"), path), _tables(archive))


def read_header(path: Path) -> Header:
    """Read a run file's header alone, which is quicker."""
    with _readable(path), zipfile.ZipFile(path) as archive:
        return _header(archive.read("header.json"), path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"no run file {path}", "`kvtune runs` lists those in the output folder") from error
    except IsADirectoryError as error:
        raise UsageError(
            f"{path} is a folder, not a run file",
            f"`kvtune runs {shlex.quote(str(path))}` lists the run files in it",
        ) from error
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError) as error:
        raise UsageError(
            f"{path} is not a readable run file: {getattr(error, 'strerror', None) or error}",
            f"give a {SUFFIX} file that kvtune wrote",
        ) from error


def _header(raw: bytes, path: Path) -> Header:
    decoded: Decoded = msgspec.json.decode(raw)
    schema = decoded.get("schema", 0)
    if not isinstance(schema, int) or schema > SCHEMA:
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
    extra = read_extras(decoded.pop("extra", None))
    return msgspec.structs.replace(msgspec.convert(decoded, Header), extra=extra)


def _tables(archive: zipfile.ZipFile) -> dict[str, Table]:
    """Known columns only. A column that an older writer did not have is filled with zeros, NaN or empty text."""
    tables: dict[str, Table] = {}
    names = {n for n in archive.namelist() if n.startswith("tables/") and n.endswith(".npy")}
    for name, columns in TABLES.items():
        present = {c for c in columns if f"tables/{name}/{c}.npy" in names}
        if not present:
            continue
        table = empty_table(name)
        for column in present:
            with archive.open(f"tables/{name}/{column}.npy") as member:
                table[column] = np.load(io.BytesIO(member.read()), allow_pickle=False)
        rows = len(next(iter(table[c] for c in present)))
        for column in columns.keys() - present:
            fill = np.nan if columns[column] == "f8" else ("" if columns[column] == "U" else 0)
            table[column] = np.full(rows, fill, dtype="U1" if columns[column] == "U" else columns[column])
        tables[name] = table
    return tables
