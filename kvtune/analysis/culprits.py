"""Which objects cause collections, by type and allocation site, as the probes counted them: Run -> Culprits. Pure.

Counts are of sampled collections; `per_step` scales them to all: count / samples x collections / steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtune.analysis.processes import process_keys
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class Culprit:
    """`file` is empty where only the type is known; `share` of all counted objects of the process."""

    type: str
    file: str
    line: int
    count: int
    bytes: int
    share: float
    per_step: float | None


@dataclass(frozen=True, slots=True)
class Culprits:
    """One process. `level` is the probe that counted: `sites` (type and line) or `types`."""

    level: str
    samples: int
    collections: int
    rows: tuple[Culprit, ...]


def culprits(run: Run) -> dict[str, Culprits]:
    """Per process key, rows with the most numerous first: by site where sites were sampled, else by type."""
    found: dict[str, Culprits] = {}
    for level in ("sites", "types"):
        told = _mapping(run.header.extra.get(level))
        for key, facts in _by_process(run, told).items():
            samples, collections = _number(facts.get("samples")), _number(facts.get("collections"))
            rows = _rows(facts, _scale(samples, collections, told.get("steps")))
            if rows:
                found.setdefault(key, Culprits(level, samples, collections, rows))
    return found


def grown(run: Run) -> dict[str, tuple[Culprit, ...]]:
    """Per process key, what it held more of at the end than at the beginning (probe level `full`)."""
    told = _mapping(run.header.extra.get("growth"))
    found = {key: _rows(facts, None) for key, facts in _by_process(run, told).items()}
    return {key: rows for key, rows in found.items() if rows}


def _rows(facts: Mapping[str, Any], scale: float | None) -> tuple[Culprit, ...]:
    told = facts.get("rows", [])
    rows = (
        [row for row in told if isinstance(row, Mapping) and row.get("type")]
        if isinstance(told, list)
        else []
    )
    total = sum(_number(row.get("count")) for row in rows) or 1
    return tuple(
        Culprit(
            type=str(row["type"]),
            file=str(row.get("file", "")),
            line=_number(row.get("line")),
            count=_number(row.get("count")),
            bytes=_number(row.get("bytes")),
            share=_number(row.get("count")) / total,
            per_step=None if scale is None else _number(row.get("count")) * scale,
        )
        for row in rows
    )


def _scale(samples: int, collections: int, steps: Any) -> float | None:
    if not samples or not collections or not isinstance(steps, int) or steps < 1:
        return None
    return collections / samples / steps


def _by_process(run: Run, told: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Facts by process key, from facts by process number."""
    keys = process_keys(run)
    return {
        keys[int(number)]: facts
        for number, facts in _mapping(told.get("processes")).items()
        if str(number).isdigit() and int(number) < len(keys) and isinstance(facts, Mapping)
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> int:
    return (
        int(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
        else 0
    )
