"""What the probes counted beside their rings, as header data: triggers, survivors, culprits. Pure reading.

Rows stand by process index; counts are of the sampled collections, with what turns them into counts per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtune.engine.launch import HostOutcome
from kvtune.engine.rings import ProcessRing
from kvtune.probe.objects.tally import load
from kvtune.probe.records import Collection, Step

TRIGGERS = 10


def instruments(
    folder: Path,
    rings: Sequence[ProcessRing],
    index: dict[int, int],
    statuses: list[dict[str, Any]],
    outcome: HostOutcome,
) -> dict[str, Any]:
    """`ledger` (each process's young generation and triggers), and `types`, `sites`, `growth` where they ran."""
    ledger, steps = _ledger(rings, statuses, outcome)
    found: dict[str, Any] = {"ledger": ledger} if ledger else {}
    windows = {
        "types": (outcome.start_ns, outcome.end_ns),
        "sites": (outcome.culprits_ns, outcome.over_ns),
        "growth": (outcome.start_ns, outcome.end_ns),
    }
    for name, (begin, end) in windows.items():
        processes = {
            str(index[pid]): {k: v for k, v in facts.items() if k != "pid"}
            for pid, facts in load(folder, name).items()
            if pid in index and (facts.get("rows") or facts.get("of_steps"))
        }
        if processes:
            count = sum(begin <= at <= end for at in steps)
            found[name] = {"steps": count, "processes": {k: _by_step(f, count) for k, f in processes.items()}}
    return found


def _by_step(facts: dict[str, Any], steps: int) -> dict[str, Any]:
    """EngineCore's rows are those of its sampled steps; what stood at its sampled collections is kept beside them."""
    sampled = facts.pop("of_steps", {})
    if not sampled.get("rows"):
        return facts
    return {**facts, "at_collections": facts, **sampled, "collections": steps, "sampled": "steps"}


def _ledger(
    rings: Sequence[ProcessRing], statuses: list[dict[str, Any]], outcome: HostOutcome
) -> tuple[dict[str, Any], list[int]]:
    """The ledger by process number, and the start of every step in any phase."""
    facts = {s["pid"]: s for s in statuses}
    found: dict[str, Any] = {}
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
        own = facts.get(ring.pid, {})
        lines = own.get("triggers", [])
        found[str(ring.process)] = {
            "collections": collections,
            "young": young,
            "survivors": survivors,
            "heap": own.get("heap", {}),
            "triggers": [
                {"file": lines[n][0], "line": lines[n][1], "collections": times}
                for n, times in triggers.most_common(TRIGGERS)
                if 0 <= n < len(lines)
            ],
        }
    return found, steps
