"""Names that people read for things that a run numbers: its processes, its finish reasons."""

from __future__ import annotations

from kvtune.run.types import ProcessInfo, Run

ROLES = {"front_end": "front end", "engine_core": "EngineCore", "worker": "worker"}


def process_name(run: Run, index: int) -> str:
    """`front end`, `EngineCore`, `worker`, numbered where several share a role; `process N` where none is known."""
    processes = run.header.processes
    if not 0 <= index < len(processes):
        return f"process {index}"
    own = processes[index]
    name = ROLES.get(own.role, own.role)
    peers = [p for p in processes if p.role == own.role]
    return name if len(peers) == 1 else f"{name} {_number(own, peers)}"


def _number(own: ProcessInfo, peers: list[ProcessInfo]) -> int:
    return [p.pid for p in peers].index(own.pid)
