"""The run files of a folder: which there are, which is the newest, and which files belong to each. Any process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtune.errors import KvtuneError
from kvtune.run.file import SUFFIX, read_label

BESIDE = (".html", "-compared.html", ".trace.json", ".speedscope.json", ".csv", ".log")
"""Endings of what kvtune writes beside a run file of the same name; `.csv` is a folder."""


def run_files(folder: Path) -> Iterator[Path]:
    """Every run file below the folder. Hidden folders are left out: runs that are being measured."""
    for place, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(place) / n for n in sorted(names) if n.endswith(SUFFIX) and not n.startswith("."))


def newest_first(paths: Sequence[Path]) -> list[Path]:
    """By when the runs began, not by when their files were written; unreadable files are last."""

    def began(path: Path) -> tuple[str, float]:
        try:
            return read_label(path).started_at, path.stat().st_mtime
        except (KvtuneError, OSError):
            return "", 0.0

    return sorted(paths, key=began, reverse=True)


def taken(folder: Path, name: str) -> bool:
    """Whether the folder has a run of this name, or anything that is named as what belongs to such a run."""
    return any(each.name.startswith((f"{name}.", f"{name}-compared.")) for each in folder.iterdir())


def belongings(path: Path) -> list[Path]:
    """The run file, and what kvtune wrote beside it: its page, its exports, its engine's log."""
    beside = (path.with_name(f"{path.stem}{ending}") for ending in BESIDE)
    return [path, *(each for each in beside if each.exists())]
