"""The status file of an engine process: its role, its instruments, its collector. JSON, read by the launcher.

It is replaced as a whole when the instruments start, then about once a second and at phase changes by a thread.
Nothing is written at the exit: vLLM may end EngineCore with SIGKILL even normally.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TypedDict

from kvtune.base.files import replacing
from kvtune.plugin.core.state import CoreState

FRONT_END = "KVTUNE_FRONT_END"
"""Environment variable with the front end's pid: its helper processes are named MainProcess, too."""


class GcFacts(TypedDict, total=False):
    """The collector's state. `frozen`: the most frozen objects so far. `collections`: by generation."""

    enabled: bool
    thresholds: list[int]
    frozen: int
    collections: list[int]


class CacheFacts(TypedDict, total=False):
    """EngineCore's KV cache (describe.py); `tiers`: names of the pool's queues; `offload`: the tier of host memory."""

    num_blocks: int
    hash_block_size: int | None
    hit_alignment_tokens: int | None
    retention_interval: int | None
    groups: list[dict[str, object]]
    scheduler: str
    pool: str
    policy: str
    prefix_caching: bool
    tiers: list[str]
    offload: dict[str, object]
    kv_specs: dict[str, object]
    kv_specs_failed: str


class ProcessFacts(TypedDict, total=False):
    """One process's status file. Only EngineCore has `cache`; only EngineCore and workers have `core`."""

    pid: int
    role: str
    name: str
    python: str
    level: str
    disabled: dict[str, str]
    gc: GcFacts
    cache: CacheFacts
    core: CoreState
    triggers: list[tuple[str, int]]
    heap: dict[str, int]


def role() -> str:
    """Return front_end, engine_core, worker or helper, by the process's name: vLLM names most processes it starts.

    A helper is a separate program that the front end runs, for instance to inspect a new model's class.
    """
    name = multiprocessing.current_process().name
    if name == "MainProcess" and os.environ.get(FRONT_END, str(os.getpid())) != str(os.getpid()):
        return "helper"
    if name.startswith("EngineCore"):
        return "engine_core"
    if name.startswith(("VllmWorker", "Worker")) or "RayWorker" in name:
        return "worker"
    return "front_end"


class Status:
    """The facts about one process, and the file that holds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.due = False
        """Set `due` after adding a fact that should be written at once."""
        self.facts: ProcessFacts = {
            "pid": os.getpid(),
            "role": role(),
            "name": multiprocessing.current_process().name,
            "python": sys.version.split()[0],
        }

    def write(self, *, count_frozen: bool = True) -> None:
        """Replace the file. A failure to write is ignored, so that it does not end the engine.

        `count_frozen`: walk all frozen objects, which takes milliseconds in which no other thread runs.
        """
        frozen = self.facts["gc"]["frozen"] if "gc" in self.facts else 0
        self.facts["gc"] = {
            "enabled": gc.isenabled(),
            "thresholds": list(gc.get_threshold()),
            # The largest count so far: the core unfreezes the heap when the process ends.
            "frozen": max(frozen, gc.get_freeze_count()) if count_frozen else frozen,
            "collections": [s["collections"] for s in gc.get_stats()],
        }
        path = self._folder / f"status-{os.getpid()}.json"
        with contextlib.suppress(OSError, TypeError, ValueError), replacing(path) as part:
            part.write(json.dumps(self.facts).encode())


def read_statuses(folder: Path) -> list[ProcessFacts]:
    """Return all processes' facts in the order front end, EngineCore, workers, others; then by pid."""
    order = {"front_end": 0, "engine_core": 1, "worker": 2}
    statuses: list[ProcessFacts] = []
    for path in folder.glob("status-*.json"):
        with contextlib.suppress(OSError, ValueError):
            statuses.append(json.loads(path.read_text()))
    return sorted(statuses, key=lambda f: (order.get(f["role"], 3), f["pid"]))
