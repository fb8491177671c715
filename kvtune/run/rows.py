"""A list of runs that were made, a JSON object a line: what a call that was cut off goes on from. Plain files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read_rows(path: Path, fields: Collection[str]) -> list[dict[str, Any]]:
    """The whole lines that have these fields; a line that a crash cut off is a run that is made again."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and set(fields) <= row.keys():
            found.append(row)
    return found


def add_row(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
