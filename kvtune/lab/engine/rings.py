"""Turns ring files, samples and receipts into a run's tables. Reads each file once.

Tables cover the measuring phase, on the run's clock. A record in which the clock went backwards (a suspended or
migrated machine) has no valid duration: it is left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from kvtune.data.run.types import Table, empty_table, table_of, table_of_rows
from kvtune.lab.engine.messages import RECEIPTS_FILE
from kvtune.plugin.probe.records import AnyRecord, Collection, Copies, PoolChange, Recomputed, Record, Step
from kvtune.plugin.probe.ring import read_ring

if TYPE_CHECKING:
    from kvtune.lab.engine.device import DeviceSample
    from kvtune.lab.engine.launch import HostOutcome
    from kvtune.lab.engine.process import Sample

Timed = tuple[int, float, Record]
"""A record of a process, and its time in seconds of the run's clock."""


@dataclass(frozen=True, slots=True)
class ProcessRing:
    """The records of one process's ring file; `process` is the process's index in the run."""

    process: int
    pid: int
    records: list[AnyRecord]
    lost: int


@dataclass(slots=True)
class RingTables:
    """The tables. By process index: `lost` records were overwritten before reading, `backwards` had clock errors."""

    steps: Table = field(default_factory=dict)
    gc: Table = field(default_factory=dict)
    pool: Table = field(default_factory=dict)
    copies: Table = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)
    computed_twice: dict[str, dict[str, int]] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)


def read_rings(folder: Path, index: dict[int, int]) -> list[ProcessRing]:
    """Return the rings of the processes in `index` (pid to number). Files that cannot be read are left out."""
    rings = []
    for path in sorted(folder.glob("ring-*.bin")):
        try:
            ring = read_ring(path)
        except (OSError, ValueError):
            continue
        process = index.get(ring.pid)
        if process is not None:
            rings.append(ProcessRing(process, ring.pid, ring.rows, ring.lost))
    return rings


def ring_tables(rings: Sequence[ProcessRing], outcome: HostOutcome) -> RingTables:
    """Turn the rings' records of the measuring phase into a run's tables."""
    tables = RingTables()
    steps: list[Timed] = []
    collections: list[Timed] = []
    copies: list[Timed] = []
    pool: list[tuple[float, ...]] = []
    zero, end = outcome.start_ns, outcome.end_ns
    for ring in rings:
        process = ring.process
        tables.lost[process] = ring.lost
        for record in ring.records:
            if not zero or not zero <= record.start_ns <= end:
                continue
            start_s = (record.start_ns - zero) / 1e9
            if isinstance(record, Step | Collection) and record.clock_went_back:
                tables.backwards[process] = tables.backwards.get(process, 0) + 1
            elif isinstance(record, Step):
                steps.append((process, start_s, record))
            elif isinstance(record, Collection):
                collections.append((process, start_s, record))
            elif isinstance(record, PoolChange):
                evicted, free = enumerate(record.evicted), record.free_blocks
                pool += [(process, start_s, queue, count, free) for queue, count in evicted if count]
            elif isinstance(record, Recomputed):
                causes = tables.computed_twice.setdefault(str(record.request), {})
                for cause, tokens in record.causes.items():
                    causes[cause] = causes.get(cause, 0) + tokens
            elif isinstance(record, Copies):
                copies.append((process, start_s, record))
            else:
                tables.digests.append(record.value)
    tables.steps, tables.gc = records_table("steps", steps), records_table("gc", collections)
    tables.steps["wait_us"][tables.steps["wait_us"] < 0] = nan
    tables.gc["line"] += 1
    tables.pool = table_of_rows("pool", sorted(pool, key=itemgetter(1)))
    tables.copies = records_table("copies", copies)
    return tables


def records_table(name: str, timed: Sequence[Timed]) -> Table:
    """Return the table of records of one kind, in the order of their times: their fields, times in microseconds."""
    if not timed:
        return empty_table(name)
    processes, times_s, records = zip(*sorted(timed, key=itemgetter(1)), strict=True)
    fields = np.array([structs.astuple(record) for record in records], "i8").T
    columns = dict(zip(records[0].__struct_fields__, fields, strict=True))
    in_us = {f"{name[:-3]}_us": values / 1e3 for name, values in columns.items() if name.endswith("_ns")}
    return table_of(name, {"process": processes, "t_s": times_s, **columns, **in_us})


def memory_table(samples: Sequence[Sample], index: dict[int, int], outcome: HostOutcome) -> Table:
    """Return the samples of the measuring phase, including the one that was taken right after its end."""
    zero, end = outcome.start_ns, max(outcome.end_ns, outcome.sampled_ns)
    rows = [
        (index[pid], (at_ns - zero) / 1e9, *figures)
        for pid, at_ns, *figures in map(astuple, samples)
        if pid in index and zero and zero <= at_ns <= end
    ]
    return table_of_rows("memory", rows)


def devices_table(samples: Sequence[DeviceSample], outcome: HostOutcome) -> Table:
    """Return a row for each sample of a GPU in the measuring phase."""
    zero, end = outcome.start_ns, outcome.end_ns
    rows = [
        (device, (at_ns - zero) / 1e9, *figures)
        for device, at_ns, *figures in map(astuple, samples)
        if zero and zero <= at_ns <= end
    ]
    return table_of_rows("devices", rows)


def receipts_table(folder: Path, outcome: HostOutcome) -> Table:
    path = folder / RECEIPTS_FILE
    raw = path.read_bytes() if path.exists() else b""
    at_ns = np.frombuffer(raw[: len(raw) // 8 * 8], "i8")
    measured = (at_ns >= outcome.start_ns) & (at_ns <= outcome.end_ns)
    return {"t_s": (at_ns[measured] - outcome.start_ns) / 1e9}
