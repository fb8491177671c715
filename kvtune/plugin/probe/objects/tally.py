"""Bounded counts of objects by type and line, and the file that holds them. Engine processes; imports nothing heavy.

When the table is full, further keys are counted under `other`, so the sum stays right.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from sys import getsizeof
from typing import TypedDict

from kvtune.base.files import replacing

LIMIT = 4096
REPORTED = 60

Key = tuple[str, str, int]
"""Type, file, line; file is "" if only the type is known."""

OWN = str(Path(__file__).parents[1])
"""The folder of the probe."""

OTHER: Key = ("other", "", 0)


class TallyRow(TypedDict):
    type: str
    file: str
    line: int
    count: int
    bytes: int


class Tally:
    """Count and bytes of each key, for at most `limit` keys."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self.rows: dict[Key, list[int]] = {}

    def add(self, key: Key, count: int, size_bytes: int) -> None:
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= self._limit:
                key = OTHER
            row = self.rows.setdefault(key, [0, 0])
        row[0] += count
        row[1] += size_bytes

    def add_made(
        self, objects: Iterable[object], site: Callable[[object], tuple[str, int]], *, unknown: bool = True
    ) -> None:
        """Count objects by their type and the line that made them, without those that the probe's own code made.

        `unknown`: also those of which nobody knows the line.
        """
        counts: dict[tuple[type, str, int], list[int]] = {}
        for each in objects:
            file, line = site(each)
            row = counts.setdefault((type(each), file, line), [0, 0])
            row[0] += 1
            row[1] += getsizeof(each)
        for (kind, file, line), (count, size) in counts.items():
            if not file.startswith(OWN) and (file or unknown):
                self.add((type_name(kind), file, line), count, size)

    def top(self, count: int = REPORTED) -> list[TallyRow]:
        """Return the most frequent rows; the last row, `other`, sums up the rest."""
        ranked = sorted(self.rows.items(), key=lambda item: (-item[1][0], item[0]))
        shown = [item for item in ranked if item[0] != OTHER][:count]
        named = {key for key, _ in shown}
        rows: list[TallyRow] = [
            {"type": key[0], "file": key[1], "line": key[2], "count": n, "bytes": size}
            for key, (n, size) in shown
        ]
        rest = [row for key, row in ranked if key not in named]
        if rest:
            n, size = sum(row[0] for row in rest), sum(row[1] for row in rest)
            rows.append({"type": OTHER[0], "file": "", "line": 0, "count": n, "bytes": size})
        return rows


def type_name(kind: type) -> str:
    """Return `module.Name`, or only the name for builtins."""
    module = getattr(kind, "__module__", "")
    name = getattr(kind, "__qualname__", "") or kind.__name__
    return name if module in ("builtins", "", None) else f"{module}.{name}"


def save(folder: Path, name: str, facts: Mapping[str, object]) -> None:
    """Replace `NAME-PID.json` as a whole. A failure to write is ignored, so that it does not end the engine."""
    path = folder / f"{name}-{os.getpid()}.json"
    with contextlib.suppress(OSError, TypeError, ValueError), replacing(path) as part:
        part.write(json.dumps({"pid": os.getpid(), **facts}).encode())


def load(folder: Path, name: str) -> dict[int, dict[str, object]]:
    """Return the counts that a run's processes saved under `name`, by pid; files that cannot be read are left out."""
    saved: dict[int, dict[str, object]] = {}
    for path in sorted(folder.glob(f"{name}-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(path.read_text())
            saved[int(facts["pid"])] = facts
    return saved
