"""Names that people read for what a run calls by key: its processes, the causes of misses."""

from __future__ import annotations

from kvtune.analysis.processes import process_keys
from kvtune.run.types import Run

ROLES = {"front_end": "front end", "engine_core": "EngineCore"}

CAUSES = {
    "cold": "never seen before",
    "partial_block": "seen, but not a whole block",
    "last_token": "last token, always recomputed",
    "not_cached": "seen before, no longer cached",
    "unclassified": "cause unknown",
}


def process_title(key: str) -> str:
    """`front end`, `EngineCore`, `worker 1` for the keys of `kvtune.analysis.processes`."""
    for role, title in ROLES.items():
        if key == role or key.startswith(f"{role}_"):
            return f"{title}{key[len(role) :].replace('_', ' ')}"
    return key.replace("_", " ")


def process_name(run: Run, index: int) -> str:
    """The title of the process that a table calls by its number."""
    keys = process_keys(run)
    return process_title(keys[index]) if 0 <= index < len(keys) else f"process {index}"


def cause_title(cause: str) -> str:
    return CAUSES.get(cause, cause.replace("_", " "))
