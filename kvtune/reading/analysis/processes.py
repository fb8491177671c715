"""Keys and titles of a run's processes: `front_end`, `engine_core`, `worker`; numbered where several share a role."""

from __future__ import annotations

from collections import Counter

from kvtune.data.run.types import Run

ENGINE_ROLES = ("front_end", "engine_core", "worker")
ROLES = {"front_end": "front end", "engine_core": "EngineCore"}


def process_keys(run: Run) -> list[str]:
    """Return a key for each of `header.processes`, and for larger process indices that appear in tables."""
    roles = [process.role or "process" for process in run.header.processes]
    highest = max(
        (
            int(run.table(name)["process"].max())
            for name in ("steps", "gc", "memory")
            if len(run.table(name)["process"])
        ),
        default=-1,
    )
    roles += ["process"] * (highest + 1 - len(roles))
    peers = Counter(roles)
    seen: Counter[str] = Counter()
    keys = []
    for role in roles:
        keys.append(role if peers[role] == 1 else f"{role}_{seen[role]}")
        seen[role] += 1
    return keys


def process_title(key: str) -> str:
    """Return the title for a key of `process_keys`: `front end`, `EngineCore`, `worker 1`."""
    for role, title in ROLES.items():
        if key == role or key.startswith(f"{role}_"):
            return f"{title}{key[len(role) :].replace('_', ' ')}"
    return key.replace("_", " ")
