"""Samples the stacks of each EngineCore and worker with py-spy, in the measuring phase. Runs in the CLI's process.

py-spy needs the permission to trace other processes; `preflight` checks it before an engine is started.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import psutil

from kvtune.base import children
from kvtune.base.errors import KvtuneError
from kvtune.base.files import creating
from kvtune.data.run.extras import FlameBox, StackFunction, StackSamples
from kvtune.data.run.types import Run

RATE_HZ = 100
TRIAL_S = 30.0
MOST_FUNCTIONS = 15
LOOPS = ("run_busy_loop", "worker_busy_loop")
"""The functions in which EngineCore's and a worker's main threads run."""
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class Frame(TypedDict, total=False):
    name: str
    file: str
    line: int | None


class SharedFrames(TypedDict, total=False):
    frames: list[Frame]


class SampledThread(TypedDict, total=False):
    """Samples are stacks of indices into the frames, outermost first; weights are their shares of the time."""

    samples: list[list[int]]
    weights: list[float]


class SpeedscopeProfile(TypedDict, total=False):
    """A recording of py-spy, in speedscope's format."""

    shared: SharedFrames
    profiles: list[SampledThread]


def find_py_spy() -> str | None:
    """Return the py-spy of this environment, else the one on PATH; None if there is neither."""
    beside_python = Path(sys.executable).parent / "py-spy"
    return str(beside_python) if beside_python.exists() else children.program("py-spy")


def trial(program: str) -> subprocess.CompletedProcess[str] | None:
    """Let py-spy read the stack of a process that, like an engine, is not its child; None if it does not answer."""
    child = children.start(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        return children.answer([program, "dump", "--pid", str(child.pid)], timeout_s=TRIAL_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def refusal(program: str | None) -> str:
    """Return why stacks cannot be sampled here, or "" if they can."""
    if program is None:
        return "py-spy is not installed"
    tried = trial(program)
    if tried is None:
        return f"py-spy did not answer within {TRIAL_S:.0f} s"
    if tried.returncode == 0:
        return ""
    lines = (tried.stderr or tried.stdout).strip().splitlines()
    return lines[-1][:200] if lines else f"py-spy ended with exit code {tried.returncode}"


def yama_scope() -> int | None:
    """Return yama/ptrace_scope: 0 the user's processes, 1 descendants only, 2 root only, 3 none. None: no such file."""
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return None


@dataclass(slots=True)
class Stacks:
    """Runs one py-spy for each sampled process."""

    program: str
    _running: list[tuple[str, children.Child, Path]] = field(default_factory=list)

    @classmethod
    def preflight(cls) -> Stacks:
        program = find_py_spy()
        why = refusal(program)
        if why or program is None:
            hint = "run as root or with CAP_SYS_PTRACE (in a container: --cap-add SYS_PTRACE), or leave out --stacks"
            if scope := yama_scope():
                hint = f"kernel.yama.ptrace_scope is {scope}: `sysctl kernel.yama.ptrace_scope=0`, or run as root"
            raise KvtuneError(f"--stacks cannot sample other processes: {why}", hint)
        return cls(program)

    def start(self, host_pid: int, folder: Path) -> None:
        """Attach to each EngineCore and worker below `host_pid`, recognized by their process titles."""
        with contextlib.suppress(psutil.Error):
            titles = {
                process.pid: " ".join(process.cmdline())
                for process in psutil.Process(host_pid).children(recursive=True)
            }
            for name, pid in sampled(titles).items():
                self._attach(name, pid, folder / f"stacks-{name}.json")

    def _attach(self, role: str, pid: int, path: Path) -> None:
        arguments = [
            self.program,
            "record",
            "--pid",
            str(pid),
            "--rate",
            str(RATE_HZ),
            "--format",
            "speedscope",
        ]
        arguments += ["--output", str(path), "--duration", "86400"]
        running = children.start(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._running.append((role, running, path))

    def stop(self) -> None:
        """End the recordings: py-spy writes its file on SIGINT, or when the sampled process has ended."""
        for _, running, _ in self._running:
            if running.poll() is None:
                running.send_signal(signal.SIGINT)
        for _, running, _ in self._running:
            try:
                running.wait(timeout=20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()

    def attach(self, run: Run, run_path: Path) -> Run:
        """Copy the recordings beside the run file; add top functions and flame graphs to the run."""
        stacks: dict[str, StackSamples] = {}
        for role, _, path in self._running:
            try:
                profile = json.loads(path.read_text())
            except (OSError, ValueError):
                stacks[role] = StackSamples(failed="py-spy left no recording")
                continue
            kept = run_path.with_name(f"{run_path.stem}.{role}.speedscope.json")
            with creating(kept) as copy:
                copy.write(path.read_bytes())
            loop = of_loops(profile)
            stacks[role] = StackSamples(
                file=kept.name,
                rate_hz=RATE_HZ,
                threads="loop" if loop else "all",
                top=top_functions(loop or profile),
                flame=flame(loop or profile),
            )
        return run.with_extra(stacks=stacks)


def sampled(titles: Mapping[int, str]) -> dict[str, int]:
    """Return the pid of each EngineCore and worker by role; several of a role are numbered: `worker_0`, `worker_1`."""
    by_role: dict[str, list[int]] = {}
    for pid, title in sorted(titles.items()):
        if "EngineCore" in title:
            by_role.setdefault("engine_core", []).append(pid)
        elif "Worker" in title:
            by_role.setdefault("worker", []).append(pid)
    return {
        role if len(pids) == 1 else f"{role}_{number}": pid
        for role, pids in by_role.items()
        for number, pid in enumerate(pids)
    }


def of_loops(profile: SpeedscopeProfile) -> SpeedscopeProfile | None:
    """Return the profile with only the threads that run vLLM's busy loops; None if there are no such threads."""
    frames = profile.get("shared", {}).get("frames", [])
    loops = {i for i, frame in enumerate(frames) if str(frame.get("name", "")).endswith(LOOPS)}
    threads = [t for t in profile.get("profiles", []) if any(loops & set(s) for s in t.get("samples", []))]
    return {**profile, "profiles": threads} if threads else None


def _samples(profile: SpeedscopeProfile) -> Iterator[tuple[list[int], float]]:
    for thread in profile.get("profiles", []):
        yield from zip(thread.get("samples", []), thread.get("weights", []), strict=False)


def top_functions(profile: SpeedscopeProfile) -> list[StackFunction]:
    """Return the functions with most self time over all threads, with their share of all samples."""
    frames = profile.get("shared", {}).get("frames", [])
    self_time: dict[int, float] = {}
    total = 0.0
    for stack, weight in _samples(profile):
        total += weight
        if stack:
            self_time[stack[-1]] = self_time.get(stack[-1], 0.0) + weight
    ranked = sorted(self_time.items(), key=lambda item: -item[1])[:MOST_FUNCTIONS]
    return [
        StackFunction(
            function=frames[i].get("name", ""),
            file=frames[i].get("file", ""),
            line=frames[i].get("line") or 0,
            share=weight / total if total else 0.0,
        )
        for i, weight in ranked
    ]


def flame(profile: SpeedscopeProfile, most: int = 600, least_share: float = 0.002) -> list[FlameBox]:
    """Return the boxes of a flame graph over all threads: (depth, start, share, function, file, line).

    Start and share are fractions of all samples. Boxes below `least_share` are left out, and the smallest beyond `most`
    boxes.
    """
    frames = profile.get("shared", {}).get("frames", [])
    weights: dict[tuple[int, ...], float] = {}
    total = 0.0
    for stack, weight in _samples(profile):
        total += weight
        for depth in range(1, len(stack) + 1):
            path = tuple(stack[:depth])
            weights[path] = weights.get(path, 0.0) + weight
    if not total:
        return []
    large = sorted((p for p, w in weights.items() if w >= least_share * total), key=lambda p: -weights[p])
    kept = set(large[:most])
    starts: dict[tuple[int, ...], float] = {(): 0.0}
    free: dict[tuple[int, ...], float] = {}
    boxes: list[FlameBox] = []
    for path in sorted(kept, key=lambda p: (len(p), -weights[p], p)):
        parent = path[:-1]
        if parent not in starts:
            continue  # its parent was left out: both have the share at which the list was cut
        start = free.get(parent, starts[parent])
        starts[path], free[parent] = start, start + weights[path] / total
        frame = frames[path[-1]] if path[-1] < len(frames) else {}
        share = round(weights[path] / total, 5)
        names = frame.get("name", ""), frame.get("file", ""), frame.get("line") or 0
        boxes.append((len(path) - 1, round(start, 5), share, *names))
    return boxes
