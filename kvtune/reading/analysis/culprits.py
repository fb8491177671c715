"""The objects that cause collections, by type and allocation site: Run -> Culprits per process. Pure.

The probes count objects at sampled collections. `per_step` scales a count to all collections, per step of the engine:
count / samples x collections / steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.data.run.extras import ObjectCounts, ObjectSamples
from kvtune.data.run.types import Run
from kvtune.reading.analysis.processes import process_keys


@dataclass(frozen=True, slots=True)
class Culprit:
    """Objects of one type and line. `file` is empty if only the type is known. `share`: of the process's objects."""

    type: str
    file: str
    line: int
    count: int
    bytes: int
    share: float
    per_step: float | None


@dataclass(frozen=True, slots=True)
class Culprits:
    """One process's culprits. `level`: the probe level that counted them, `sites` (type and line) or `types`."""

    level: str
    samples: int
    collections: int
    rows: tuple[Culprit, ...]


def culprits(run: Run) -> dict[str, Culprits]:
    """Return each process's culprits by process key: by site if sites were sampled, else by type."""
    extra = run.header.extra
    by_process: dict[str, Culprits] = {}
    for level, samples in (("sites", extra.sites), ("types", extra.types)):
        if samples is None:
            continue
        for key, counts in _by_process(run, samples).items():
            rows = _rows(counts, _scale(counts, samples.steps))
            if rows:
                by_process.setdefault(key, Culprits(level, counts.samples, counts.collections, rows))
    return by_process


def _rows(counts: ObjectCounts, scale: float | None) -> tuple[Culprit, ...]:
    rows = [row for row in counts.rows if row.type]
    total = sum(row.count for row in rows) or 1
    return tuple(
        Culprit(
            type=row.type,
            file=row.file,
            line=row.line,
            count=row.count,
            bytes=row.bytes,
            share=row.count / total,
            per_step=None if scale is None else row.count * scale,
        )
        for row in rows
    )


def _scale(counts: ObjectCounts, steps: int) -> float | None:
    if not counts.samples or not counts.collections or steps < 1:
        return None
    return counts.collections / counts.samples / steps


def _by_process(run: Run, samples: ObjectSamples) -> dict[str, ObjectCounts]:
    """Return counts by process key, from counts by process index."""
    keys = process_keys(run)
    return {
        keys[int(index)]: counts
        for index, counts in samples.processes.items()
        if index.isdigit() and int(index) < len(keys)
    }
