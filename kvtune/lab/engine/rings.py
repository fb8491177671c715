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

import numpy as np

from kvtune.data.run.types import Table, table_of_rows
from kvtune.lab.engine.device import DeviceSample
from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.messages import RECEIPTS_FILE
from kvtune.lab.engine.process import Sample
from kvtune.plugin.probe.records import AnyRecord, Collection, Copies, PoolChange, Recomputed, Step
from kvtune.plugin.probe.ring import read_ring

Row = tuple[float, ...]


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
    steps: list[Row] = []
    collections: list[Row] = []
    pool: list[Row] = []
    copies: list[Row] = []
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
                steps.append((process, start_s, *_step_row(record)))
            elif isinstance(record, Collection):
                times = (record.pause_ns / 1e3, record.cpu_ns / 1e3)
                counts = (record.collected, record.uncollectable, record.line + 1)
                collections.append((process, start_s, record.generation, *times, *counts))
            elif isinstance(record, PoolChange):
                evicted, free = enumerate(record.evicted), record.free_blocks
                pool += [(process, start_s, queue, count, free) for queue, count in evicted if count]
            elif isinstance(record, Recomputed):
                causes = tables.computed_twice.setdefault(str(record.request), {})
                for cause, tokens in record.causes.items():
                    causes[cause] = causes.get(cause, 0) + tokens
            elif isinstance(record, Copies):
                copies.append((process, start_s, *record.row()))
            else:
                tables.digests.append(record.value)
    tables.steps = table_of_rows("steps", sorted(steps, key=itemgetter(1)))
    tables.pool = table_of_rows("pool", sorted(pool, key=itemgetter(1)))
    tables.copies = table_of_rows("copies", sorted(copies, key=itemgetter(1)))
    tables.gc = table_of_rows("gc", sorted(collections, key=itemgetter(1)))
    return tables


def _step_row(step: Step) -> Row:
    times = (step.step_ns, step.schedule_ns, step.execute_ns, step.update_ns, step.cpu_ns)
    return (
        *(ns / 1e3 for ns in times),
        *(step.scheduled_tokens, step.prefill_tokens, step.requests, step.running, step.waiting),
        *(step.free_blocks, step.context_tokens),
        *(step.schedule_objects, step.execute_objects, step.update_objects, step.other_objects),
        step.prefill_context_tokens,
        step.preempted,
        step.wait_ns / 1e3 if step.wait_ns >= 0 else nan,
        step.device_ns / 1e3,
    )


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
