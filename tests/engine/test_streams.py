"""Two thousand open streams at once, of which some are cancelled and some are read late: nothing stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtune.engine.sockets import socket_folder
from kvtune.fake_device.settings import constant, write_device
from tests.engine.streams import ROUNDS, STREAMS

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]


def test_streams_that_end_are_cancelled_or_read_late_leave_nothing(tmp_path: Path) -> None:
    write_device(constant(0.0), tmp_path)
    with socket_folder() as sockets:
        environment = {
            **os.environ,
            **sockets,
            "KVTUNE_CORE": "kvtune",
            "KVTUNE_SET": "",
            "KVTUNE_RECIPE": "",
            "KVTUNE_STRICT": "1",
            "KVTUNE_RUN_DIR": str(tmp_path),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "HF_HUB_OFFLINE": "1",
        }
        script = Path(__file__).with_name("streams.py")
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("left ")), "")
    assert line, done.stderr[-3000:]
    left = json.loads(line.removeprefix("left "))
    assert len(left) == ROUNDS
    for each in left:
        # Two fifths are cancelled, by themselves or by another task; a stream may end before it is cancelled.
        assert each["complete"] >= STREAMS * 3 // 5
        assert (each["states"], each["rows"]) == (0, 0)
        assert each["slots"] <= 3 * STREAMS
    first, last = left[1]["objects"], left[-1]["objects"]
    assert last - first < STREAMS, f"objects of the front end: {[each['objects'] for each in left]}"
