"""The real engine when it is refused, cannot start, or is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtune.data.run.file import read_run
from kvtune.lab.engine.messages import REQUESTS_FILE
from tests.choice import first_of
from tests.lab.engine.real import (
    alive,
    engine_of,
    in_shared_memory,
    left_in_shared_memory,
    measured_until_the_last_step,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def some_are_served(output: Path) -> bool:
    """Whether requests have finished, more than the warm-up sends: the log in the work folder grows by each."""
    return any(log.stat().st_size > 10_000 for log in output.glob(f".kvtune-*/{REQUESTS_FILE}"))


@pytest.mark.full
@pytest.mark.parametrize(("device", "processes"), first_of([("host", 2), ("engine", 3)]))
def test_ctrl_c_saves_what_was_measured_and_leaves_no_process(
    tmp_path: Path, device: str, processes: int
) -> None:
    shared_before = in_shared_memory()
    command = [sys.executable, "-m", "kvtune", "profile", "tiny-opt", "--core", "stock", "-o", str(tmp_path)]
    command += ["--on", device]
    command += ["-w", "decode:requests=4000,prompt=48,output=16,concurrency=32", "--json"]
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
    while not some_are_served(tmp_path) and time.monotonic() < end and running.poll() is None:
        time.sleep(0.1)
    engine = engine_of(tmp_path)
    assert len(engine) >= processes
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
    measured_until_the_last_step(run)
    assert not alive(engine)
    assert not left_in_shared_memory(shared_before)
    assert "interrupted" in "".join(lines)
    assert f"what was measured is in {facts['run_file']}, marked partial" in " ".join("".join(lines).split())
