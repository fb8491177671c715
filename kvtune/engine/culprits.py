"""What the probes counted beside their rings, as header data: triggers, survivors, culprits. Pure reading.

Rows stand by process index; counts are of the sampled collections, with what turns them into counts per step.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kvtune.engine.launch import HostOutcome
from kvtune.probe.objects.tally import load
from kvtune.probe.ring import COLLECTION, STEP, read_ring

TRIGGERS = 10


def instruments(
    folder: Path, index: dict[int, int], statuses: list[dict[str, Any]], outcome: HostOutcome
) -> dict[str, Any]:
    """`ledger` (each process's young generation and triggers), and `types`, `sites`, `growth` where they ran."""
    ledger, steps = _ledger(folder, index, statuses, outcome)
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
    folder: Path, index: dict[int, int], statuses: list[dict[str, Any]], outcome: HostOutcome
) -> tuple[dict[str, Any], list[int]]:
    facts = {s["pid"]: s for s in statuses}
    found: dict[str, Any] = {}
    steps: list[int] = []
    for path in sorted(folder.glob("ring-*.bin")):
        try:
            ring = read_ring(path)
        except (OSError, ValueError):
            continue
        if ring.pid not in index:
            continue
        triggers: Counter[int] = Counter()
        young = survivors = collections = 0
        for kind, _, _, *v in ring.rows:
            if kind == STEP:
                steps.append(v[0])
            elif kind == COLLECTION and outcome.start_ns <= v[0] <= outcome.end_ns:
                collections += 1
                young += v[6]
                survivors += max(0, v[6] - v[3])
                triggers[v[7]] += 1
        own = facts.get(ring.pid, {})
        lines = own.get("triggers", [])
        found[str(index[ring.pid])] = {
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
