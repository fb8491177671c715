"""A minute of a soak of each model on real servers holds; planted defects do not stay hidden for five."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.soak.models import MODELS
from kvtune.data.run.file import read_run

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(2400)]


def soak(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.soak", *arguments, "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_minute_of_trouble_holds(model: str, tmp_path: Path) -> None:
    done = soak(tmp_path, "--minutes", "1", "--model", model)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "fault SIGTERM | 3 |" in done.stdout, "three servers were stopped in the middle of a round"
    assert "recorded |" in done.stdout and "preemptions, kvtune |" in done.stdout


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        ("freed twice", "died"),
        ("kept after abort", "left behind"),
        ("wrong token", "wrong token"),
        ("leaked handle", "leak"),
    ],
)
def test_a_planted_defect_is_found_within_five_minutes(plant: str, kind: str, tmp_path: Path) -> None:
    done = soak(tmp_path, "--minutes", "5", "--model", "tiny-llama", "--plant", plant)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    folder = tmp_path / "tiny-llama-0"
    failure = json.loads((folder / "failure.json").read_text())
    # An engine's death may be seen first in an answer that it did not give.
    found = [each for each in failure["findings"] if each["kind"] == kind]
    assert found, failure["findings"]
    assert kind != "died" or "audit: " in found[0]["text"], "the audit stopped EngineCore"
    assert failure["plant"] == plant and failure["rounds"][-1]["asks"]
    assert len(read_run(folder / "failure.kvrun").table("steps")["step_us"]) > 10
    assert "EngineCore" in (folder / "kvtune.log").read_text()
