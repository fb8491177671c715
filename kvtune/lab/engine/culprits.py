"""Reads the probes' counts into `header.extra`: GC triggers, survivors, objects by type and line.

Results are by process index. Objects are counted only at sampled collections, so the numbers of samples, collections
and steps are stored with the counts, to scale them to one step.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtune.data.run.extras import CollectorCounts, Extras, HeapSize, ObjectCounts, ObjectSamples, Trigger
from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.rings import ProcessRing
from kvtune.plugin.probe.objects.tally import load
from kvtune.plugin.probe.records import Collection, Step
from kvtune.plugin.probe.status import ProcessFacts

TRIGGERS = 10


def instruments(
    folder: Path,
    rings: Sequence[ProcessRing],
    index: dict[int, int],
    statuses: list[ProcessFacts],
    outcome: HostOutcome,
) -> Extras:
    """Return each process's GC counts (`ledger`), and its objects (`types`, `sites`) if that probe level ran."""
    ledger, steps = _ledger(rings, statuses, outcome)
    measured = sum(outcome.start_ns <= step <= outcome.end_ns for step in steps)
    second_pass = sum(outcome.culprits_ns <= step <= outcome.over_ns for step in steps)
    return Extras(
        ledger=ledger,
        types=_samples(load(folder, "types"), index, measured),
        sites=_samples(load(folder, "sites"), index, second_pass),
    )


def _samples(saved: dict[int, dict[str, object]], index: dict[int, int], steps: int) -> ObjectSamples | None:
    processes: dict[str, ObjectCounts] = {}
    for pid, facts in saved.items():
        if pid in index and (facts.get("rows") or facts.get("of_steps")):
            with contextlib.suppress(msgspec.ValidationError):  # leave a damaged tally out, keep the run
                processes[str(index[pid])] = _counts(facts, steps)
    return ObjectSamples(steps=steps, processes=processes) if processes else None


def _counts(facts: dict[str, object], steps: int) -> ObjectCounts:
    """Return a process's counts: of sampled steps if it has any (EngineCore), with those at collections attached."""
    at_collections = msgspec.convert(facts, ObjectCounts)
    sampled = msgspec.convert(facts.get("of_steps", {}), ObjectCounts)
    if not sampled.rows:
        return at_collections
    return msgspec.structs.replace(
        at_collections,
        samples=sampled.samples,
        rows=sampled.rows,
        at_collections=at_collections,
        collections=steps,
        sampled="steps",
    )


def _ledger(
    rings: Sequence[ProcessRing], statuses: list[ProcessFacts], outcome: HostOutcome
) -> tuple[dict[str, CollectorCounts], list[int]]:
    """Return the GC counts by process index, and the start of every step in any phase (monotonic ns)."""
    status_of = {s["pid"]: s for s in statuses}
    ledger: dict[str, CollectorCounts] = {}
    steps: list[int] = []
    for ring in rings:
        triggers: Counter[int] = Counter()
        young = survivors = collections = 0
        for record in ring.records:
            if isinstance(record, Step):
                steps.append(record.start_ns)
            elif isinstance(record, Collection) and outcome.start_ns <= record.start_ns <= outcome.end_ns:
                collections += 1
                young += record.young
                survivors += max(0, record.young - record.collected)
                triggers[record.line] += 1
        status, heap = status_of.get(ring.pid, ProcessFacts()), HeapSize()
        with contextlib.suppress(msgspec.ValidationError):
            heap = msgspec.convert(status.get("heap", {}), HeapSize)
        lines = status.get("triggers", [])
        last = max((number for number in triggers if number < len(lines)), default=-1)
        ledger[str(ring.process)] = CollectorCounts(
            collections=collections,
            young=young,
            survivors=survivors,
            heap=heap,
            triggers=[
                Trigger(file=lines[n][0], line=lines[n][1], collections=times)
                for n, times in triggers.most_common(TRIGGERS)
                if 0 <= n < len(lines)
            ],
            lines=[f"{file}:{line}" for file, line in lines[: last + 1]],
        )
    return ledger, steps
