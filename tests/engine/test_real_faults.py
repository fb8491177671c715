"""The real engine when things go wrong: refused flags and prompts, failed starts, killed processes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from kvtune.engine.plan import Event
from kvtune.engine.profile import Job, Profiled, profile
from kvtune.probe.process import shared_memory_of
from kvtune.run.file import read_run
from kvtune.workload.spec import build

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def kvtune(*arguments: str, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtune", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=output,
        env={**os.environ, "NO_COLOR": "1"},
    )


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


def left_in_shared_memory(before: set[Path]) -> set[Path]:
    """What is new there and mapped by no living process: leaked."""
    mapped = {name for pid in psutil.pids() for name in shared_memory_of(pid)}
    return {p for p in set(Path("/dev/shm").iterdir()) - before if str(p) not in mapped}


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_prompt_longer_than_the_model_allows_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    done = kvtune("profile", "tiny-opt", "-w", "prefill:requests=2,prompt=5000,output=8", output=tmp_path)
    assert done.returncode == 2
    assert "max-model-len 4096" in done.stderr and "5000 prompt" in done.stderr
    assert not list((tmp_path / "reports").glob("*.kvrun"))


def test_a_flag_that_vllm_does_not_know_is_named(tmp_path: Path) -> None:
    done = kvtune("profile", "tiny-opt", "--", "--no-such-flag", "3", output=tmp_path)
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    done = kvtune("profile", "tiny-opt", "--", "--kv-cache-memory-bytes", "900G", output=tmp_path)
    assert done.returncode == 1
    what, next_ = done.stderr.strip().splitlines()[-2:]
    assert "kv cache" in what.lower() or "memory" in what.lower()
    assert next_.strip().startswith("next:")
    assert "Traceback" not in done.stderr


def profile_and_kill(output: Path, role: str) -> Profiled:
    """Kill one process of the engine once some requests have finished."""
    job = Job(
        model="tiny-opt",
        workload=build("decode:requests=4000,prompt=48,output=60,concurrency=64"),
        core="stock",
        output=output,
    )
    killed: list[int] = []

    def on_event(event: Event) -> None:
        if event.kind != "progress" or event.finished < 64 or killed:
            return
        for process in engine_of(output):
            if role in " ".join(process.cmdline()):
                killed.append(process.pid)
                process.kill()

    result = profile(job, on_event)
    assert killed, f"no process {role} was found"
    return result


@pytest.mark.parametrize("role", ["EngineCore", "Worker"])
def test_an_engine_that_is_killed_leaves_a_partial_run(tmp_path: Path, role: str) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    result = profile_and_kill(tmp_path, role)
    assert result.error is not None and result.error.exit_code == 1
    run = read_run(result.path)
    assert run.header.state == "partial" and run.header.why
    finished = run.table("requests")["finish"] == "length"
    assert 64 <= finished.sum() < 4000
    assert len(run.table("steps")["t_s"]) > 10
    assert len(run.table("memory")["t_s"]) > 0
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]
    assert not left_in_shared_memory(shared_before)


def test_ctrl_c_saves_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "kvtune", "profile", "tiny-opt", "--core", "stock", "-o", str(tmp_path)]
    command += ["-w", "decode:requests=4000,prompt=48,output=60,concurrency=32", "--json"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines: list[str] = []
    assert running.stderr is not None and running.stdout is not None

    def follow() -> None:
        assert running.stderr is not None
        for line in iter(running.stderr.readline, ""):
            lines.append(line)  # noqa: PERF402 - each line must be seen when it comes

    reader = threading.Thread(target=follow)
    reader.start()
    end = time.monotonic() + 400
    while (
        not any("measuring" in line for line in lines) and time.monotonic() < end and running.poll() is None
    ):
        time.sleep(0.1)
    time.sleep(3)
    engine = engine_of(tmp_path)
    assert len(engine) >= 3
    running.send_signal(signal.SIGINT)
    facts = json.loads(running.stdout.read())
    assert running.wait(timeout=60) == 130
    reader.join()
    running.stdout.close()
    running.stderr.close()
    assert 0 < facts["requests"] < 4000 and facts["state"] == "partial"
    run = read_run(Path(facts["run_file"]))
    assert run.header.state == "partial" and run.header.why == "interrupted"
    assert (run.table("requests")["finish"] == "length").sum() > 0
    assert not alive(engine)
    assert not left_in_shared_memory(shared_before)
    assert "interrupted" in "".join(lines)
