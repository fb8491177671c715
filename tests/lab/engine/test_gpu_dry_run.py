"""The dry run of `make gpu`: every rung but the search, on a simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_ladder
from bench.gpu_ladder import RUNGS


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.timeout(0)
def test_the_dry_run_climbs_on_a_device_that_only_takes_time(tmp_path: Path) -> None:
    """All rungs but the search, from another folder: nothing but the installed kvtune is needed."""
    script = Path(gpu_ladder.__file__)
    words = [sys.executable, str(script), "--dry", "--budget", "600", "-o", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(made["rungs"]) == len(RUNGS) and not made["stopped"]
    shape = made["rungs"]["gemma-3-4b"]["result"]
    assert shape["equal_answers"] == {"again": 1.0, "kvtune": 1.0}
    assert [shape[core]["replay_differs_in"] for core in ("stock", "kvtune")] == [0, 0]
    assert shape["kvtune"]["hit_share_by_visit"][1] > 0.5
