"""Samples memory, CPU time, threads and waits for a CPU of an engine's processes. A thread of the CLI's process.

USS (memory that no other process shares) takes a walk over the page tables, so only every tenth sample has it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, monotonic_ns, sleep

import psutil

from kvtune.lab.engine.device import DeviceSampler

INTERVAL_S = 0.2
USS_EVERY = 10
MOST_USS_BYTES = 4 << 30
"""USS of larger processes is not sampled: it walks the page tables, which takes seconds with a tier of host memory."""
SHARED_MEMORY = Path("/dev/shm")
# The inode in a line of /proc/PID/maps that maps a file in shared memory.
_SHARED = re.compile(r"\s(\d+)\s+/dev/shm/")


@dataclass(frozen=True, slots=True)
class Sample:
    pid: int
    at_ns: int
    rss_bytes: int
    uss_bytes: int  # 0: not measured in this sample
    cpu_s: float
    threads: int
    wait_s: float = math.nan
    """Seconds so far in which threads were ready to run but had no CPU (`RunQueueWait`); NaN if not known."""
    stopped: bool = False


class RunQueueWait:
    """Measures how long a process waits for a CPU: in each interval, the wait of the thread that waited longest.

    Not the sum over threads: two threads that wait at the same time delay the process once. Read from /proc.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = f"/proc/{pid}/task"
        self._threads: dict[str, int] = {}
        self._total_ns = 0

    def read_s(self) -> float:
        """Return seconds since the first call; NaN if the kernel has no count. OSError if the process is gone."""
        now: dict[str, int] = {}
        for thread in os.scandir(self._tasks):
            with contextlib.suppress(OSError, IndexError, ValueError):  # the thread ended, or no schedstats
                now[thread.name] = _waited_ns(f"{thread.path}/schedstat")
        if not now:
            return math.nan
        if self._threads:
            self._total_ns += max(
                0, *(waited - self._threads.get(thread, 0) for thread, waited in now.items())
            )
        self._threads = now
        return self._total_ns / 1e9


def _waited_ns(path: str) -> int:
    """Return the second number in a thread's schedstat. Called for every thread, so without Path or buffers."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 64).split()[1])
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class ProcessSampler:
    """Samples a process and all its descendants until stopped; keeps their names and the shared memory they mapped."""

    root: int
    interval_s: float = INTERVAL_S
    samples: list[Sample] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    shared_memory: set[int] = field(default_factory=set)  # inodes
    devices: DeviceSampler = field(default_factory=DeviceSampler)
    _waits: dict[int, RunQueueWait] = field(default_factory=dict)
    _known: dict[int, psutil.Process] = field(default_factory=dict)
    _ticks: int = 0
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Start one thread for the processes and one for the GPUs, whose PCIe traffic takes NVML 40 ms."""
        self.devices.start()
        tasks = {"process-sampler": self.sample}
        if self.devices.running:
            tasks["device-sampler"] = self.devices.sample
        for name, task in tasks.items():
            self._threads.append(threading.Thread(target=self._run, args=(task,), name=name, daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10)
        self.devices.stop()

    def _run(self, sample: Callable[[], None]) -> None:
        while not self._stop.wait(self.interval_s):
            sample()

    def sample(self) -> None:
        """Sample each process now. Also called at a measurement's start and end, as the thread may wake late."""
        with self._one_at_a_time:
            self._sample_all()

    def _sample_all(self) -> None:
        with contextlib.suppress(psutil.Error):
            root = self._known.get(self.root) or psutil.Process(self.root)
            for process in (root, *root.children(recursive=True)):
                self._known.setdefault(process.pid, process)
        for pid, process in list(self._known.items()):
            try:
                if not process.is_running():  # it ended, or another process has its pid
                    raise psutil.NoSuchProcess(pid)
                self._sample(process, self._ticks)
            except (psutil.Error, OSError):
                del self._known[pid]
                self._waits.pop(pid, None)
        self._ticks += 1

    def _sample(self, process: psutil.Process, tick: int) -> None:
        with process.oneshot():
            state = process.status()
            if state == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(process.pid)
            memory, times, threads = process.memory_info(), process.cpu_times(), process.num_threads()
        uss = 0
        if tick % USS_EVERY == 0:
            self.names[process.pid] = " ".join(process.cmdline())[:200] or process.name()
            if memory.rss <= MOST_USS_BYTES:
                with contextlib.suppress(psutil.Error, OSError):
                    uss = process.memory_full_info().uss
            self.shared_memory.update(shared_memory_of(process.pid))
        wait_s = self._waits.setdefault(process.pid, RunQueueWait(process.pid)).read_s()
        cpu_s = times.user + times.system
        self.samples.append(
            Sample(
                process.pid,
                monotonic_ns(),
                memory.rss,
                uss,
                cpu_s,
                threads,
                wait_s,
                state == psutil.STATUS_STOPPED,
            )
        )


def shared_memory_of(pid: int) -> set[int]:
    """Return the inodes of the files in /dev/shm that a process has mapped.

    Inodes, not names: glibc creates a semaphore under a temporary name and then links it to the final one, and the
    creator's map keeps the temporary name.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {int(match.group(1)) for match in _SHARED.finditer(maps)}


def shared_memory_in_use() -> set[int]:
    """Return the inodes of the files in /dev/shm that any living process has mapped."""
    return {inode for pid in psutil.pids() for inode in shared_memory_of(pid)}


def shared_memory_files() -> dict[int, Path]:
    """Return the files directly in /dev/shm, by inode, without links."""
    files: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode):
                    files[about.st_ino] = path
    return files


def born(pid: int) -> float:
    """Return a process's start time; 0.0 if it has ended. Pids are reused: only both together are unique."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def kill_tree(root: int, grace_s: float, root_born: float = 0.0) -> None:
    """End a process, its descendants and its session: SIGTERM to the root, SIGKILL to what is alive after `grace_s`.

    If the root has ended, its children have another parent but are still in its session. If the process did not start
    at `root_born`, it has only reused the root's pid, and nothing is done.
    """
    now = born(root)
    if root_born and now and now != root_born:
        return
    family = {p.pid: p for p in _session(root)}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(root)
        family.update({p.pid: p for p in (top, *top.children(recursive=True))})
        top.terminate()
    alive = _alive_after(list(family.values()), grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _alive_after(alive, 5.0)


def _alive_after(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all have ended, collected by their parents or not; return those that live after `timeout_s`."""
    end = monotonic() + timeout_s
    while processes := [process for process in processes if _lives(process)]:
        if monotonic() > end:
            break
        sleep(0.005)
    return processes


def _lives(process: psutil.Process) -> bool:
    """Whether any of its threads runs: a zombie may be the first of threads that still end."""
    try:
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) and process.num_threads() <= 1
        return process.is_running() and not ended
    except psutil.NoSuchProcess:
        return False


def _session(leader: int) -> list[psutil.Process]:
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == leader:
                members.append(psutil.Process(pid))
    return members
