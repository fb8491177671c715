"""A journal of completed runs, one JSON object a line, from which an interrupted command resumes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def read_rows(path: Path, fields: Collection[str]) -> list[dict[str, Any]]:
    """The complete lines with these fields. The run of an incomplete line, cut off by a crash, is made again."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and set(fields) <= row.keys():
            rows.append(row)
    return rows


def add_row(path: Path, row: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
