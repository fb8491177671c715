"""A journal of completed runs, one JSON object a line, from which an interrupted command resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtune.errors import UsageError


def read_rows(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The complete lines with these fields. The run of an incomplete line, cut off by a crash, is made again.

    UsageError if the file does not begin like a row: it is not kvtune's, and nothing is added to it.
    """
    if not os.path.lexists(path):
        return []
    start = f'{{"{fields[0]}"'
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "no file"
    if path.is_symlink() or not text.startswith(start[: len(text)]):
        raise UsageError(
            f"{path} is not a journal that kvtune wrote", "move it away, or choose another folder with -o"
        )
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and set(fields) <= row.keys():
            rows.append(row)
    return rows


def add_row(path: Path, row: Mapping[str, object]) -> None:
    """Add a line, after any incomplete one left by a crash. Call `read_rows` first: it refuses others' files."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "r+b") as file:
        length = file.seek(0, os.SEEK_END)
        torn = length and os.pread(file.fileno(), 1, length - 1) != b"\n"
        file.write(b"\n" * bool(torn) + json.dumps(row).encode() + b"\n")
