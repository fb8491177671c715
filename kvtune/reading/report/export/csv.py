"""A run as CSV: a folder with a file per table, columns as in the run file, and the header as JSON."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.files import creating, moved, unwritable
from kvtune.base.scratch import scratch
from kvtune.data.run.file import HEADER
from kvtune.data.run.types import TABLES, Run
from kvtune.reading.report.names import process_name


def write_csv(run: Run, folder: Path, *, force: bool = False) -> list[Path]:
    """Write every recorded table to `folder`. Missing times are empty; `process_name` follows `process`."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        what = "link" if folder.is_symlink() else "file"
        raise UsageError(
            f"{folder} is a {what}; CSV needs a folder, one file per table", "give a folder with -o"
        )
    if folder.exists() and any(folder.iterdir()) and not force:
        raise UsageError(f"{folder} is not empty", "give another folder with -o, or --force to write into it")
    written = [folder / f"{name}.csv" for name in TABLES if name in run.tables]
    for path in (*written, folder / HEADER):
        if why := unwritable(path):
            raise UsageError(f"cannot write {path}: {why}", "give another folder with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch("csv", folder, hidden=True) as whole:  # a full disk leaves the folder as it was
            for path in written:
                write_table(run, path.stem, whole / path.name)
            text = msgspec.json.format(msgspec.json.encode(run.header), indent=1)
            with creating(whole / HEADER, private=run.private) as part:
                part.write(text)
            for path in (*written, folder / HEADER):
                moved(whole / path.name, path)
    except OSError as error:
        raise KvtuneError(
            f"cannot write CSV to {folder}: {error.strerror or error}", "choose another folder with -o"
        ) from error
    return [folder / HEADER, *written]


def write_table(run: Run, name: str, path: Path) -> None:
    table = run.tables[name]
    heads = list(TABLES[name])
    columns: list[list[object]] = [_plain(table[head]) for head in heads]
    if "process" in heads:
        heads.insert(1, "process_name")
        processes = table["process"].tolist()
        title = {process: process_name(run, process) for process in set(processes)}
        columns.insert(1, [title[process] for process in processes])
    with (
        creating(path, private=run.private) as part,
        io.TextIOWrapper(part, encoding="utf-8", newline="") as out,
    ):
        writer = csv.writer(out)
        writer.writerow(heads)
        writer.writerows(zip(*columns, strict=True))


def _plain(column: NDArray[np.generic]) -> list[object]:
    if column.dtype.kind != "f":
        return list(column.tolist())
    return ["" if value != value else value for value in column.tolist()]
