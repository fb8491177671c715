"""What tests of the real engine share: the command line in a process of its own, and what an engine leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvtune.probe.process import shared_memory_of
from kvtune.run.file import read_run
from kvtune.run.types import Run

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Ran:
    facts: dict[str, Any]
    run: Run
    stderr: str


def kvtune(*arguments: str, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtune", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=output,
        env={**os.environ, "NO_COLOR": "1"},
    )


def profiled(output: Path, *arguments: str, engine: tuple[str, ...] = ()) -> Ran:
    done = kvtune("profile", *arguments, "--json", "-o", str(output), "--", *engine, output=output)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)  # one object on stdout and nothing else
    return Ran(facts, read_run(Path(facts["run_file"])), done.stderr)


def engine_of(output: Path) -> list[psutil.Process]:
    """The processes of the engine whose host works under `output`: its session (other tests run engines too)."""
    found: list[psutil.Process] = []
    for host in psutil.process_iter(["cmdline"]):
        line = " ".join(host.info["cmdline"] or [])
        if "kvtune.engine.host" in line and str(output) in line:
            for process in psutil.process_iter():
                try:
                    if os.getsid(process.pid) == host.pid:
                        found.append(process)
                except OSError:
                    continue
    return found


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def in_shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.iterdir())


def left_in_shared_memory(before: set[Path]) -> set[Path]:
    """What is new there and mapped by no living process: leaked.

    Engines of other tests start and end meanwhile, and theirs may not be mapped for a moment: a leak stays.
    """
    found = in_shared_memory() - before
    deadline = time.monotonic() + 5.0
    while found and time.monotonic() < deadline:
        mapped = {name for pid in psutil.pids() for name in shared_memory_of(pid)}
        found = {p for p in found & in_shared_memory() if str(p) not in mapped}
        time.sleep(0.2)
    return found
