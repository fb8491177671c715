"""The launcher against hosts that misbehave: scripts in place of the engine, real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtune.lab.engine import launch as launch_module
from kvtune.lab.engine import process as process_module
from kvtune.lab.engine.launch import HostOutcome, launch
from kvtune.lab.engine.messages import LOG_FILE, Event, HostPlan
from kvtune.lab.engine.rings import memory_table
from kvtune.lab.setup.setup import Setup
from tests.living import living

PLAN = HostPlan(setup=Setup(model="m"), vllm_args=[])

PRELUDE = """
import os, sys, time, json, signal, subprocess
from time import monotonic_ns
def send(**event):
    text = json.dumps(event).encode()
    os.write(int(sys.argv[2]), len(text).to_bytes(8, "big") + bytes(8) + text)
"""


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Launch a script as the host; the outcome and the events."""
    real = launch_module.subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        return real([sys.executable, str(tmp_path / "host.py"), *command[3:]], **options)  # type: ignore[call-overload]

    def run(body: str, on_event=lambda event: None) -> tuple[HostOutcome, list[Event]]:  # type: ignore[no-untyped-def]
        (tmp_path / "host.py").write_text(PRELUDE + body)
        monkeypatch.setattr(launch_module.subprocess, "Popen", popen)
        events: list[Event] = []

        def seen(event: Event) -> None:
            events.append(event)
            on_event(event)

        try:
            return launch(PLAN, tmp_path, {}, seen), events
        finally:
            monkeypatch.setattr(launch_module.subprocess, "Popen", real)

    return run


def test_a_host_that_ends_well(run_script) -> None:  # type: ignore[no-untyped-def]
    outcome, events = run_script(
        """
send(kind="phase", name="starting")
send(kind="engine", facts={"vllm": "0.32.0"})
send(kind="phase", name="measuring", at_ns=1000)
send(kind="phase", name="finishing", at_ns=5000)
send(kind="done")
"""
    )
    assert outcome.error is None
    assert (outcome.start_ns, outcome.end_ns) == (1000, 5000)
    assert outcome.engine == {"vllm": "0.32.0"}
    assert [e.kind for e in events] == ["phase", "engine", "phase", "phase", "done"]


def test_the_processes_are_sampled_at_both_ends_of_the_measurement(run_script, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """On a busy machine the sampler's thread may not run meanwhile."""
    monkeypatch.setattr(
        launch_module,
        "ProcessSampler",
        lambda pid, **options: process_module.ProcessSampler(pid, interval_s=3600.0, **options),
    )
    outcome, _ = run_script(
        """
send(kind="phase", name="measuring", at_ns=monotonic_ns())
send(kind="phase", name="finishing", at_ns=monotonic_ns())
time.sleep(1)  # an engine shuts down
send(kind="done")
"""
    )
    assert outcome.sampler is not None
    (pid,) = {sample.pid for sample in outcome.sampler.samples}
    rows = memory_table(outcome.sampler.samples, {pid: 0}, outcome)
    assert rows["process"].tolist() == [0, 0]
    measured_s = (outcome.end_ns - outcome.start_ns) / 1e9
    assert 0 <= rows["t_s"][0] < rows["t_s"][1] >= measured_s


FAILS = {
    "the cause from the log": (
        """
print("(Worker pid=1) ERROR 11-21 09:58:00 [x.py:9] ValueError: the cache is too small", flush=True)
send(kind="failed", name="RuntimeError", message="Engine core initialization failed. See root cause above.")
sys.exit(1)
""",
        "the engine failed: ValueError: the cache is too small",
        LOG_FILE,
    ),
    "a killed process": (
        """
print("(EngineCore pid=1) INFO 11-21 09:58:00 [x.py:9] all is well", flush=True)
send(kind="died", codes={"EngineCore": -9})
send(kind="failed", name="EngineDeadError", message="EngineCore encountered an issue. See stack trace (above).")
sys.exit(1)
""",
        "the engine failed: EngineCore was killed by SIGKILL",
        "engine's log: all is well",
    ),
    "a hub out of reach": (
        """
print("httpcore2.ConnectError: [Errno -2] Name or service not known", flush=True)
send(kind="failed", name="ConnectError", message="[Errno -2] Name or service not known")
sys.exit(1)
""",
        "m is neither built in nor a folder, and the model hub cannot be reached from here",
        "tiny-gemma3",
    ),
    "a killed front end": (
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "the engine failed: the engine's front end was killed by SIGSEGV",
        "",
    ),
    "a usage error": (
        'send(kind="failed", message="no such flag", hint="look", exit_code=2)\nsys.exit(2)',
        "no such flag",
        "look",
    ),
}


@pytest.mark.parametrize(("body", "message", "more"), FAILS.values(), ids=FAILS)
def test_what_a_host_died_of_is_said(run_script, body: str, message: str, more: str) -> None:  # type: ignore[no-untyped-def]
    outcome, _ = run_script(body)
    assert outcome.error is not None and outcome.error.message == message
    assert more in " ".join((outcome.error.hint, *outcome.error.details))
    assert (outcome.error.exit_code == 2) == (more == "look")


def test_a_host_that_dies_silently(run_script) -> None:  # type: ignore[no-untyped-def]
    outcome, _ = run_script('send(kind="phase", name="measuring", at_ns=monotonic_ns())\nos._exit(7)')
    assert outcome.error is not None and "7" in outcome.error.message
    assert outcome.start_ns > 0 and not outcome.end_ns  # the record ends with the last step


def test_children_that_outlive_the_host_are_killed(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome, _ = run_script(
        """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], pass_fds=(int(sys.argv[2]),))
open(sys.argv[1] + "/child", "w").write(str(child.pid))
time.sleep(0.5)
send(kind="phase", name="measuring", at_ns=monotonic_ns())
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    child = int((tmp_path / "child").read_text())
    assert outcome.error is not None
    assert not living([child])


class Telling(process_module.ProcessSampler):
    """Writes `folder`/sampled once it has seen the shared memory that `folder`/shm names."""

    folder: Path

    def sample(self) -> None:
        super().sample()
        if (named := self.folder / "shm").exists():
            seen = {Path("/dev/shm", name).stat().st_ino for name in named.read_text().split()}
            if seen <= self.shared_memory:
                (self.folder / "sampled").touch()


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def made(pid: int, **options: Any) -> Telling:
        sampler = Telling(pid, interval_s=0.02, **options)
        sampler.folder = tmp_path
        return sampler

    monkeypatch.setattr(process_module, "USS_EVERY", 1)  # shared memory is looked at with each sample
    monkeypatch.setattr(launch_module, "ProcessSampler", made)


UNTIL_SAMPLED = """
os.rename(sys.argv[1] + "/named", sys.argv[1] + "/shm")
while not os.path.exists(sys.argv[1] + "/sampled"):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_shared_memory_of_a_killed_process_is_unlinked(run_script, telling: None, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run_script(
        """
import multiprocessing
from multiprocessing import shared_memory, resource_tracker
block = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()  # a semaphore: mapped under another name than it has
# So that nobody but the launcher can clean them up:
resource_tracker.unregister(block._name, "shared_memory")
resource_tracker.unregister(lock._semlock.name, "semaphore")
open(sys.argv[1] + "/named", "w").write(block.name + " sem." + lock._semlock.name[1:])
"""
        + UNTIL_SAMPLED
    )
    names = (tmp_path / "shm").read_text().split()
    assert len(names) == 2
    assert not [name for name in names if Path("/dev/shm", name).exists()]


def test_shared_memory_that_was_there_before_the_run_stays(  # type: ignore[no-untyped-def]
    run_script, telling: None
) -> None:
    """A model's weights, mapped by the engine."""
    kept = Path("/dev/shm", f"weights-{os.getpid()}")
    kept.write_bytes(b"mine" * 1024)
    try:
        outcome, _ = run_script(
            f"""
import mmap
mapped = mmap.mmap(os.open("{kept}", os.O_RDONLY), 4096, prot=mmap.PROT_READ)
open(sys.argv[1] + "/named", "w").write("{kept.name}")
"""
            + UNTIL_SAMPLED
        )
        assert kept.stat().st_ino in outcome.sampler.shared_memory
        assert kept.read_bytes() == b"mine" * 1024
    finally:
        kept.unlink(missing_ok=True)


def test_ctrl_c_asks_the_host_to_end_and_keeps_what_was_measured(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def on_event(event: Event) -> None:
        if event.name == "measuring":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    outcome, events = run_script(
        """
def end(*_):
    open(sys.argv[1] + "/saved", "w").write("x")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
send(kind="phase", name="measuring", at_ns=monotonic_ns())
time.sleep(60)
""",
        on_event,
    )
    assert outcome.error is not None and outcome.error.exit_code == 130
    assert not outcome.error.hint, "only who writes the run file knows whether there is one"
    assert (tmp_path / "saved").exists()
    assert [event.name for event in events] == ["measuring", "finishing"]  # stacks are sampled no longer
    assert not outcome.end_ns


def test_ctrl_c_in_the_second_pass_keeps_the_first_whole(run_script) -> None:  # type: ignore[no-untyped-def]
    def on_event(event: Event) -> None:
        if event.name == "culprits":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    outcome, _ = run_script(
        """
start = monotonic_ns()
send(kind="phase", name="measuring", at_ns=start)
send(kind="phase", name="finishing", at_ns=start + 5)
send(kind="phase", name="culprits", at_ns=start + 9)
time.sleep(60)
""",
        on_event,
    )
    assert outcome.error is not None and outcome.error.exit_code == 130
    assert outcome.end_ns == outcome.start_ns + 5
    assert outcome.over_ns > outcome.culprits_ns == outcome.start_ns + 9


def test_a_host_that_ignores_the_request_is_killed(run_script, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(launch_module, "GRACE_S", 0.2)
    pids: list[int] = []

    def on_event(event: Event) -> None:
        if event.name != "measuring":
            return
        pids.append(event.at_ns)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    run_script(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
send(kind="phase", name="measuring", at_ns=os.getpid())
time.sleep(60)
""",
        on_event,
    )
    assert not living(pids[:1])


LAUNCHER = """
import sys
from pathlib import Path
from kvtune.lab.engine import launch as module
from kvtune.lab.engine.messages import HostPlan
from kvtune.lab.setup.setup import Setup
folder = Path(sys.argv[1])
real = module.subprocess.Popen
module.subprocess.Popen = lambda command, **o: real([sys.executable, str(folder / "host.py"), *command[3:]], **o)
module.launch(HostPlan(setup=Setup(model="m"), vllm_args=[]), folder, {}, lambda event: None)
"""

HOST = """
import os, signal, subprocess, sys, time
from kvtune.plugin.probe.lifetime import die_with_parent
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; from kvtune.plugin.probe.lifetime import die_with_parent; "
    "die_with_parent(signal.SIGKILL); print(1, flush=True); time.sleep(100)"], stdout=subprocess.PIPE)
child.stdout.readline()
die_with_parent(signal.SIGTERM)
open(sys.argv[1] + "/pids.part", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + "/pids.part", sys.argv[1] + "/pids")
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_launcher_that_is_terminated_or_killed(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "host.py").write_text(HOST)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 30
    while not (tmp_path / "pids").exists() and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    launcher.send_signal(number)
    launcher.wait(timeout=60)
    end = time.monotonic() + 10
    while time.monotonic() < end and living(pids):
        time.sleep(0.05)
    assert not living(pids)
