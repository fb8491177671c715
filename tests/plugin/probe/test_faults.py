"""Faults around the probes: forks, reused pids, two runs at once, a full disk, py-spy without permission."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.run.extras import StackSamples
from kvtune.data.run.types import CoreInfo, EngineInfo, Header, HostInfo, Run, WorkloadInfo
from kvtune.lab.engine import stacks
from kvtune.plugin.probe.records import Collection
from kvtune.plugin.probe.ring import Records, Ring, read_ring

PLUGIN = """
import gc, os, sys, types
# stand-ins for the two vLLM classes that the plugin wraps: this test is about processes
for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.core.sched.scheduler",
             "vllm.v1.engine", "vllm.v1.engine.core"):
    sys.modules[name] = types.ModuleType(name)
class Scheduler:
    def __init__(self): pass
class EngineCoreProc:
    def _process_engine_step(self): return True
sys.modules["vllm.v1.core.sched.scheduler"].Scheduler = Scheduler
sys.modules["vllm.v1.engine.core"].EngineCoreProc = EngineCoreProc
from kvtune.plugin.probe.plugin import register
register(); register()
gc.collect()
"""


def run_plugin(folder: Path, code: str = "", **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN + code],
        env={**os.environ, "KVTUNE_PROBE": "light", "KVTUNE_RUN_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def full_collections(ring: Records) -> list[Collection]:
    return [one for one in ring.of(Collection) if one.generation == 2]


def test_a_forked_child_writes_a_ring_of_its_own(tmp_path: Path) -> None:
    run_plugin(
        tmp_path,
        "pid = os.fork()\nif pid == 0:\n    gc.collect(); gc.collect(); os._exit(0)\nos.waitpid(pid, 0)\n",
    )
    rings = [read_ring(path) for path in tmp_path.glob("ring-*.bin")]
    assert len(rings) == 2 and len({ring.pid for ring in rings}) == 2
    for ring in rings:
        assert 1 <= len(full_collections(ring)) <= 2


def test_the_ring_of_a_process_that_execs_stays_readable(tmp_path: Path) -> None:
    run_plugin(tmp_path, "os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])\n")
    (path,) = tmp_path.glob("ring-*.bin")
    assert read_ring(path).rows  # what was written before stays


def test_an_engine_that_execs_itself_in_a_child_leaves_the_parents_ring_whole(tmp_path: Path) -> None:
    again = tmp_path / "again.py"
    again.write_text(PLUGIN + "for _ in range(3): gc.collect()\nos._exit(0)\n")
    run_plugin(
        tmp_path,
        f"pid = os.fork()\nif pid == 0:\n    os.execv(sys.executable, [sys.executable, {str(again)!r}])\n"
        "os.waitpid(pid, 0)\ngc.collect()\nos._exit(0)\n",
    )
    rings = {ring.pid: ring for ring in map(read_ring, tmp_path.glob("ring-*.bin"))}
    full = sorted(len(full_collections(ring)) for ring in rings.values())
    assert full == [2, 4] and not any(ring.lost for ring in rings.values())


def test_a_stale_file_of_another_process_with_this_pid_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / f"ring-{os.getpid()}.bin"
    old = Ring(path, 1 << 16)
    for n in range(5):
        old.write(Collection(2, *[n] * 8))
    new = Ring(path, 1 << 16)
    new.write(Collection(0, *[7] * 8))
    records = read_ring(path)
    assert records.rows == [Collection(0, *[7] * 8)] and records.lost == 0


def test_two_runs_at_once_do_not_mix(tmp_path: Path) -> None:
    """Two process trees measure at the same time; one of them forks."""
    folders = [tmp_path / name for name in ("one", "two")]
    code = "import time\nfor _ in range({n}): gc.collect(); time.sleep(0.01)\n"
    fork = "pid = os.fork()\nif pid == 0:\n    gc.collect(); os._exit(0)\nos.waitpid(pid, 0)\n"
    running = []
    for folder, more in zip(folders, (code.format(n=20), fork + code.format(n=30)), strict=True):
        folder.mkdir()
        environment = {**os.environ, "KVTUNE_PROBE": "light", "KVTUNE_RUN_DIR": str(folder)}
        running.append(
            subprocess.Popen([sys.executable, "-c", PLUGIN + more + "os._exit(0)\n"], env=environment)
        )
    assert [process.wait() for process in running] == [0, 0]
    for folder, process, processes, full in zip(folders, running, (1, 2), (21, 31), strict=True):
        rings = {ring.pid: ring for ring in map(read_ring, folder.glob("ring-*.bin"))}
        assert len(rings) == processes
        assert len(full_collections(rings[process.pid])) == full


LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def test_a_disk_without_room_for_the_ring_disables_the_probe_and_the_program_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LIMIT + PLUGIN + "print('alive', len(gc.callbacks), flush=True)\nos._exit(0)\n",
        ],
        env={**os.environ, "KVTUNE_PROBE": "light", "KVTUNE_RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.split() == ["alive", "0"], done.stderr
    (status,) = (json.loads(p.read_text()) for p in tmp_path.glob("status-*.json"))
    assert "OSError" in status["disabled"]["light"]
    assert not list(tmp_path.glob("ring-*"))


def test_a_run_folder_that_is_gone_leaves_the_program_alone(tmp_path: Path) -> None:
    run_plugin(tmp_path / "missing", "assert len(gc.callbacks) == 0\n")
    assert not (tmp_path / "missing").exists()


def test_the_status_names_instruments_that_could_not_start(tmp_path: Path) -> None:
    (tmp_path / "phase.bin").mkdir()
    run_plugin(tmp_path)
    (status,) = (json.loads(p.read_text()) for p in tmp_path.glob("status-*.json"))
    assert "light" in status["disabled"]


RENEWED = """
import threading, time
from pathlib import Path
from kvtune.plugin.probe.phase import MEASURING, Phase
wrote, rename = [], Path.replace
def watched(path, target):
    wrote.append(threading.get_ident())
    return rename(path, target)
Path.replace = watched
phase = Phase(Path(os.environ["KVTUNE_RUN_DIR"]))
end = time.monotonic() + 20
while len(wrote) < 2 and time.monotonic() < end:
    gc.collect()
    phase.enter(MEASURING)
    time.sleep(0.01)
assert len(wrote) >= 2 and threading.get_ident() not in wrote, wrote
os._exit(0)
"""


def test_the_status_is_rewritten_by_a_thread_of_its_own(tmp_path: Path) -> None:
    """Files are slow on some machines: neither a step nor a collection may wait for one."""
    run_plugin(tmp_path, RENEWED)
    (status,) = (json.loads(p.read_text()) for p in tmp_path.glob("status-*.json"))
    assert status["triggers"] and status["heap"]["start"] > 1000


@pytest.mark.parametrize("level", ["types", "sites"])
def test_every_level_installs(tmp_path: Path, level: str) -> None:
    run_plugin(tmp_path, KVTUNE_PROBE=level)
    (status,) = (json.loads(p.read_text()) for p in tmp_path.glob("status-*.json"))
    assert status["disabled"] == {} and status["level"] == level


def test_a_refused_py_spy_is_two_lines_before_any_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(fake))
    with pytest.raises(KvtuneError, match="Permission denied") as refused:
        stacks.Stacks.preflight()
    assert "SYS_PTRACE" in refused.value.hint or "ptrace_scope" in refused.value.hint
    monkeypatch.setattr(stacks, "_YAMA", tmp_path / "scope")
    (tmp_path / "scope").write_text("1\n")
    with pytest.raises(KvtuneError) as refused:
        stacks.Stacks.preflight()
    assert "ptrace_scope is 1" in refused.value.hint


def test_a_py_spy_that_dies_while_it_samples_costs_the_stacks_and_nothing_else(tmp_path: Path) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, start_new_session=True)
    assert engine.stdout is not None
    engine.stdout.readline()
    sampled = stacks.Stacks(str(fake))
    try:
        sampled.start(engine.pid, tmp_path)
        sampled.stop()
    finally:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
        engine.stdout.close()
    run = sampled.attach(empty(), tmp_path / "a.kvrun")
    assert run.header.extra.stacks == {"engine_core": StackSamples(failed="py-spy left no recording")}


ENGINE = """
import subprocess, sys, time
# The child says itself that it is there: its title may be empty for a moment after it was started.
code = "import time; print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code, "EngineCore"])
time.sleep(60)
"""


def empty() -> Run:
    header = Header(
        kvtune="0", source="engine", started_at="", command=[], model="m", core=CoreInfo(name="stock"),
        workload=WorkloadInfo(name="w", spec="w", params={}, seed=0, hash="", requests=0),
        engine=EngineInfo(), python="3", host=HostInfo(),
    )  # fmt: skip
    return Run(header)
