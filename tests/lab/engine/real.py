"""Helpers of real-engine tests: the command line in a subprocess, and leftovers of an engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvtune.data.run.file import read_run
from kvtune.data.run.types import Run
from kvtune.lab.engine.process import shared_memory_files, shared_memory_in_use
from tests.living import living
from tests.weights.kvtune_test_weights import LOAD_FORMAT


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
    done = kvtune(
        "profile", *arguments, "--tries", "0", "--json", "-o", str(output), "--", *engine, output=output
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)  # one object on stdout and nothing else
    return Ran(facts, read_run(Path(facts["run_file"])), done.stderr)


STATES = ("tiny-granite", "tiny-qwen3next")
"""Layouts of their blocks are compared by answers, which depend on the whole prompt with the tests' weights alone."""


def lockstep(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The result of `lockstep.py` for a job, in a subprocess."""
    if job["model"] in STATES and "--load-format" not in job.get("args", ()):
        job = {**job, "args": [*job.get("args", ()), "--load-format", LOAD_FORMAT]}
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("lockstep.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(folder / "job.json"), str(folder / "out.json")],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    parsed: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return parsed


def engine_roles(run: Run) -> set[str]:
    """The roles of a run's processes: with the `uni` executor the worker is in EngineCore's."""
    return {"front_end", "engine_core"} | ({"worker"} if run.header.engine.executor != "uni" else set())


def counts_as_vllm(ran: Ran) -> None:
    """The front end's counts equal the engine's."""
    counters = ran.run.header.engine_counters
    assert counters["finished"] == ran.facts["requests"]
    assert counters["generation_tokens"] == ran.facts["output_tokens"]
    assert not [n for n in ran.run.header.notes if "counted" in n]


def measured_until_the_last_step(run: Run) -> None:
    """The run's length is that of its steps and tokens, and nothing that it recorded lies behind them."""
    steps, tokens = run.table("steps"), run.table("tokens")
    last_s = max((steps["t_s"] + steps["step_us"] / 1e6).max(), tokens["t_s"].max())
    assert abs(run.header.wall_s - last_s) < 1e-6
    for name in ("gc", "memory", "pool"):
        assert run.table(name)["t_s"].max(initial=0.0) <= last_s


def engine_of(output: Path) -> list[psutil.Process]:
    """The processes of the engine whose host works under `output`: its session (other tests run engines too)."""
    processes: list[psutil.Process] = []
    for host in psutil.process_iter(["cmdline"]):
        line = " ".join(host.info["cmdline"] or [])
        if "kvtune.lab.engine.host" in line and str(output) in line:
            for process in psutil.process_iter():
                try:
                    if os.getsid(process.pid) == host.pid:
                        processes.append(process)
                except OSError:
                    continue
    return processes


def alive(processes: list[psutil.Process]) -> list[int]:
    return living(p.pid for p in processes if p.is_running())


def in_shared_memory() -> set[int]:
    return set(shared_memory_files())


def left_in_shared_memory(before: set[int]) -> set[Path]:
    """What is new there and mapped by no living process: leaked.

    Engines of other tests start and end meanwhile, and theirs may not be mapped for a moment: a leak stays.
    """
    left = shared_memory_files()
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        gone = before | shared_memory_in_use()
        left = {i: path for i, path in shared_memory_files().items() if i in left and i not in gone}
        if not left:
            break
        time.sleep(0.2)
    return set(left.values())


def commands(processes: list[psutil.Process]) -> dict[int, str]:
    """The command lines of those that still run."""
    command_lines: dict[int, str] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            command_lines[process.pid] = " ".join(process.cmdline())
    return command_lines
