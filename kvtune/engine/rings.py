"""Ring files to tables: steps, collections and pool events of the measuring phase, on the run's clock. Pure reading.

A record in which the clock went backwards (a suspended or migrated machine) has no valid length: left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtune.engine.launch import HostOutcome
from kvtune.probe.pool import MOST_TIERS
from kvtune.probe.ring import COLLECTION, DIGEST, POOL, STEP, read_ring
from kvtune.run.types import TABLES, Table


@dataclass(slots=True)
class Rings:
    """`lost` (overwritten before they were read) and `backwards` (clock errors) count records by process index."""

    steps: Table = field(default_factory=dict)
    gc: Table = field(default_factory=dict)
    pool: Table = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)


def read_rings(folder: Path, index: dict[int, int], outcome: HostOutcome) -> Rings:
    """The records of the processes in `index` (pid to process index); unreadable files are left out."""
    found = Rings()
    steps: list[tuple[float, ...]] = []
    collections: list[tuple[float, ...]] = []
    pool: list[tuple[float, ...]] = []
    zero, end = outcome.start_ns, outcome.end_ns
    for path in sorted(folder.glob("ring-*.bin")):
        try:
            ring = read_ring(path)
        except (OSError, ValueError):
            continue
        process = index.get(ring.pid)
        if process is None:
            continue
        found.lost[process] = ring.lost
        for kind, small, number, *v in ring.rows:
            if not zero or not zero <= v[0] <= end:
                continue
            at = (v[0] - zero) / 1e9
            if kind == DIGEST:
                found.digests.append(v[1])
            elif kind == POOL:
                tiers = zip(v[1:], v[1 + MOST_TIERS : 1 + 2 * MOST_TIERS], strict=False)
                pool += [
                    (process, at, tier, *counts, number) for tier, counts in enumerate(tiers) if any(counts)
                ]
            elif min(v[1:6]) < 0:
                found.backwards[process] = found.backwards.get(process, 0) + 1
            elif kind == COLLECTION:
                collections.append((process, at, small, v[1] / 1e3, v[2] / 1e3, v[3], v[4]))
            elif kind == STEP:
                low, high = v[6] & 0xFFFFFFFF, v[6] >> 32
                running, waiting = v[7] & 0xFFFFFFFF, v[7] >> 32
                us = [x / 1e3 for x in v[1:6]]
                free, prefill_context = v[8] & 0xFFFFFFFF, v[8] >> 32
                row = (process, at, *us, low, high, number, running, waiting, free, *v[9:14])
                steps.append((*row, prefill_context))
    found.steps = table("steps", sorted(steps, key=_by_time))
    found.pool = table("pool", sorted(pool, key=_by_time))
    found.gc = table("gc", sorted(collections, key=_by_time))
    return found


def table(name: str, rows: Sequence[tuple[float, ...]]) -> Table:
    """Rows as the columns of a run's table."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(TABLES[name])
    return {c: np.array(v, dtype=kind) for (c, kind), v in zip(TABLES[name].items(), columns, strict=True)}


def _by_time(row: tuple[float, ...]) -> float:
    return row[1]
