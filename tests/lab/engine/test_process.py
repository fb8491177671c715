"""The process sampler on real processes: a whole tree, its shared memory, its end."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from kvtune.lab.engine import process
from kvtune.lab.engine.process import (
    USS_EVERY,
    ProcessSampler,
    RunQueueWait,
    born,
    kill_tree,
    shared_memory_files,
    shared_memory_of,
)
from tests.living import living

TREE = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in range(2)]
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    root = subprocess.Popen([sys.executable, "-S", "-c", TREE], stdout=subprocess.PIPE)
    assert root.stdout is not None
    root.stdout.readline()
    yield root
    kill_tree(root.pid, 0.1)
    root.wait()
    root.stdout.close()


def samples_of(sampler: ProcessSampler, pid: int) -> int:
    return sum(s.pid == pid for s in sampler.samples)


def wait_for_samples(sampler: ProcessSampler, pid: int, more: int) -> None:
    """Until the sampler has taken `more` further samples of a process; the test's own time limit ends it."""
    wanted = samples_of(sampler, pid) + more
    while samples_of(sampler, pid) < wanted:
        time.sleep(0.01)


def test_the_whole_tree_is_sampled(tree: subprocess.Popen[bytes]) -> None:
    sampler = ProcessSampler(tree.pid, interval_s=0.02)
    sampler.start()
    wait_for_samples(sampler, tree.pid, 2 * USS_EVERY)
    sampler.stop()
    pids = {s.pid for s in sampler.samples}
    assert tree.pid in pids and len(pids) == 3
    assert all(s.rss_bytes > 1 << 20 for s in sampler.samples)
    assert any(s.uss_bytes > 0 for s in sampler.samples)
    assert "time.sleep" in sampler.names[tree.pid]


def test_a_process_that_ends_does_not_end_the_sampling(tree: subprocess.Popen[bytes]) -> None:
    sampler = ProcessSampler(tree.pid, interval_s=0.02)
    sampler.start()
    victim = psutil.Process(tree.pid).children()[0]
    wait_for_samples(sampler, victim.pid, 2)
    victim.kill()
    while living([victim.pid]):  # on a busy machine it dies some samples later
        time.sleep(0.01)
    wait_for_samples(sampler, tree.pid, 2)
    count = samples_of(sampler, victim.pid)
    wait_for_samples(sampler, tree.pid, 5)
    sampler.stop()
    assert samples_of(sampler, victim.pid) == count


def test_kill_tree_leaves_nothing(tree: subprocess.Popen[bytes]) -> None:
    family = [tree.pid, *(c.pid for c in psutil.Process(tree.pid).children())]
    kill_tree(tree.pid, 0.1)
    tree.wait()
    assert not living(family)


def test_kill_tree_of_a_process_that_has_ended_kills_nothing(tree: subprocess.Popen[bytes]) -> None:
    done = subprocess.Popen([sys.executable, "-c", "pass"])
    done.wait()
    kill_tree(done.pid, 0.1)
    assert tree.poll() is None and len(psutil.Process(tree.pid).children()) > 0


def test_a_pid_that_was_given_to_another_process_is_left_alone(tree: subprocess.Popen[bytes]) -> None:
    """As if the host had started long before the process that has its pid now."""
    kill_tree(tree.pid, 0.1, root_born=born(tree.pid) - 100.0)
    assert tree.poll() is None
    kill_tree(tree.pid, 0.1, root_born=born(tree.pid))
    assert tree.wait(timeout=5) is not None and born(2**22 + 1) == 0.0


def test_a_pid_that_was_given_to_another_process_is_no_longer_sampled(
    tree: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = psutil.Process(tree.pid).children()[0].pid
    sampler = ProcessSampler(tree.pid, interval_s=0.02)
    sampler.start()
    wait_for_samples(sampler, victim, 2)
    running = psutil.Process.is_running
    # psutil's answer when another process has taken over the pid.
    monkeypatch.setattr(psutil.Process, "is_running", lambda self: self.pid != victim and running(self))
    wait_for_samples(sampler, tree.pid, 2)
    before = samples_of(sampler, victim)
    wait_for_samples(sampler, tree.pid, 5)
    sampler.stop()
    assert samples_of(sampler, victim) == before > 0


def test_a_stopped_process_is_sampled_as_stopped(tree: subprocess.Popen[bytes]) -> None:
    sampler = ProcessSampler(tree.pid, interval_s=0.02)
    sampler.start()
    wait_for_samples(sampler, tree.pid, 2)
    os.kill(tree.pid, signal.SIGSTOP)
    wait_for_samples(sampler, tree.pid, 3)
    os.kill(tree.pid, signal.SIGCONT)
    wait_for_samples(sampler, tree.pid, 3)
    sampler.stop()
    own = [sample.stopped for sample in sampler.samples if sample.pid == tree.pid]
    assert (own[0], any(own), own[-1]) == (False, True, False)
    assert not any(sample.stopped for sample in sampler.samples if sample.pid != tree.pid)


def test_a_machine_without_schedstat_says_that_waits_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    wait = RunQueueWait(os.getpid())
    wait._tasks = str(tmp_path)
    assert math.isnan(wait.read_s())


def test_the_wait_of_an_interval_is_that_of_the_thread_that_waited_longest(tmp_path: Path) -> None:
    wait = RunQueueWait(os.getpid())
    wait._tasks = str(tmp_path)
    for first, second in ((5_000, 0), (9_000, 3_000), (9_000, 10_000)):
        for thread, waited in (("1", first), ("2", second)):
            (tmp_path / thread).mkdir(exist_ok=True)
            (tmp_path / thread / "schedstat").write_text(f"1 {waited} 3\n")
        result = wait.read_s()
    assert result == pytest.approx(11e-6)  # 4 and then 7 microseconds; not 4 + 3 and then 7


def test_mapped_shared_memory_is_found() -> None:
    block = shared_memory.SharedMemory(create=True, size=4096)
    try:
        files = shared_memory_files()
        mine = {files[inode].name for inode in shared_memory_of(os.getpid()) & files.keys()}
        assert block.name in mine
    finally:
        block.close()
        block.unlink()
    assert shared_memory_of(2**22 + 1) == set()


def test_a_semaphore_is_found_in_the_process_that_made_it() -> None:
    """glibc makes it under a passing name, which /proc/PID/maps shows for good."""
    before = shared_memory_files().keys()
    semaphore = multiprocessing.get_context("spawn").Lock()
    mine = shared_memory_of(os.getpid()) & shared_memory_files().keys() - before
    assert len(mine) == 1
    del semaphore


def test_of_a_large_process_memory_of_its_own_is_not_asked(
    tree: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It walks the page tables, with the process's map locked."""
    asked = ProcessSampler(tree.pid)
    asked.sample()
    assert any(sample.uss_bytes for sample in asked.samples)
    monkeypatch.setattr(process, "MOST_USS_BYTES", 0)
    left = ProcessSampler(tree.pid)
    left.sample()
    assert left.samples and not any(sample.uss_bytes for sample in left.samples)
