"""The run files of a folder: which there are, which is the newest, and which files belong to each. Any process."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtune.base.bounded import decode_json_as
from kvtune.base.errors import KvtuneError
from kvtune.base.files import read_regular
from kvtune.data.run.file import HEADER, MOST_HEADER_BYTES, SUFFIX, read_label
from kvtune.data.run.signature import run_identity, wrote
from kvtune.data.run.types import TABLES, RunLabel

BESIDE = (".html", "-compared.html", ".trace.json", ".log")
"""Endings of the files that kvtune writes beside a run file. Exported tables are in a folder that ends with `.csv`."""


def run_files(folder: Path) -> Iterator[Path]:
    """Yield every run file below the folder. Hidden folders are left out: their runs are still being measured."""
    for place, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(place) / n for n in sorted(names) if n.endswith(SUFFIX) and not n.startswith("."))


def newest_first(paths: Sequence[Path]) -> list[Path]:
    """Sort run files by when their runs started (not by the files' times), newest first; unreadable files are last."""

    def began(path: Path) -> tuple[str, float]:
        try:
            return read_label(path).started_at, path.stat().st_mtime
        except (KvtuneError, OSError):
            return "", 0.0

    return sorted(paths, key=began, reverse=True)


def taken(folder: Path, name: str) -> bool:
    """Whether the folder has a run of this name, or a file whose name such a run's page or log would have."""
    return any(each.name.startswith((f"{name}.", f"{name}-compared.")) for each in folder.iterdir())


def belongings(path: Path) -> list[Path]:
    """Return the files that kvtune wrote beside a run file (page, exports, engine's log), and the run file last.

    Empty for a file that this kvtune cannot read as a run file.
    """
    if path.suffix != SUFFIX:
        return []
    try:
        identity = run_identity(read_label(path))
    except KvtuneError:
        return []
    beside = [path.with_name(f"{path.stem}{ending}") for ending in BESIDE]
    written = [each for each in beside if wrote(each, identity)]
    return [*written, *_exported(path.with_name(f"{path.stem}.csv"), identity), path]


def _exported(folder: Path, identity: str) -> list[Path]:
    """Return the CSV files and the header in a folder of exported tables, if the header is this run's; else none."""
    header, tables = folder / HEADER, {f"{name}.csv" for name in TABLES}
    if folder.is_symlink() or header.is_symlink():
        return []
    try:
        if run_identity(decode_json_as(read_regular(header, MOST_HEADER_BYTES), RunLabel)) != identity:
            return []
        names = sorted(each.name for each in folder.iterdir() if each.is_file() and not each.is_symlink())
    except (OSError, ValueError):
        return []
    return [*(folder / name for name in names if name in tables), header]


def delete(paths: Sequence[Path]) -> list[str]:
    """Delete the files, and a folder of exported tables once it is empty. Continue after errors, and return them."""
    errors = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
            if path.name == HEADER:
                path.parent.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # the folder has other files, too
                errors.append(f"{path}: {error.strerror or error}")
    return errors
