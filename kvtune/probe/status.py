"""Who this engine process is and what runs in it: a small JSON file, replaced whole, read by the launcher.

Written at install, and by a thread of its own about once a second and where the run's phase changes (vLLM may kill
EngineCore by SIGKILL at a normal exit, so nothing is left for the exit).
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from kvtune.files import replacing

FRONT_END = "KVTUNE_FRONT_END"
"""The pid of an engine's front end, set by itself: what else vLLM starts under a main process's name is none."""


def role() -> str:
    """front_end, engine_core, worker or helper, by the process's name (vLLM names most processes that it starts).

    A helper is a program that the front end runs: on a model's first use vLLM inspects its class in one.
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
    """The facts of one process, and the file that holds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.due = False
        """Set by whoever added a fact that should not wait for the next second."""
        self.facts: dict[str, Any] = {
            "pid": os.getpid(),
            "role": role(),
            "name": multiprocessing.current_process().name,
            "python": sys.version.split()[0],
        }

    def write(self, *, count_frozen: bool = True, **facts: Any) -> None:
        """Add `facts` and replace the file. A failure to write is ignored: status is not worth an engine.

        Counting what is frozen walks all of it: milliseconds in which no other thread runs.
        """
        self.facts.update(facts)
        frozen = self.facts.get("gc", {}).get("frozen", 0)
        self.facts["gc"] = {
            "enabled": gc.isenabled(),
            "thresholds": list(gc.get_threshold()),
            # The most that were ever frozen: the core thaws a heap again when its process ends.
            "frozen": max(frozen, gc.get_freeze_count()) if count_frozen else frozen,
            "collections": [s["collections"] for s in gc.get_stats()],
        }
        path = self._folder / f"status-{os.getpid()}.json"
        with contextlib.suppress(OSError, TypeError, ValueError), replacing(path) as part:
            part.write_text(json.dumps(self.facts))


def read_statuses(folder: Path) -> list[dict[str, Any]]:
    """All processes' facts, in the order front end, EngineCore, workers, then by pid."""
    order = {"front_end": 0, "engine_core": 1, "worker": 2}
    found: list[dict[str, Any]] = []
    for path in folder.glob("status-*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return sorted(found, key=lambda f: (order.get(f["role"], 3), f["pid"]))
