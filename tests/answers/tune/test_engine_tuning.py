"""Tuning confirmed on the real engine, its recipe verified; a sweep on both, with a trial that the engine refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(2400)]

LOAD = "rounds:prefixes=12,prefix=2000,suffix=64,output=8,rounds=3"
FLAGS = ["--", "--block-size", "32", "--num-gpu-blocks-override", "2000"]


def kvtune(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from kvtune.cli.app import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_a_tuned_recipe_holds(tmp_path: Path) -> None:
    recipe = tmp_path / "found.toml"
    limits = ("--trials", "16", "--rounds", "2", "--finalists", "1")
    printed = kvtune(
        *("tune", "tiny-gemma3", "-w", LOAD, *limits, "--recipe", str(recipe), "-o", str(tmp_path), "--json"),
        *FLAGS,
    )
    assert printed["verdict"]["winner"] and printed["verdict"]["confirmed"]
    assert printed["verdict"]["engine_runs"] == {"baseline": 2, "leader": 2}
    assert printed["verdict"]["drift_ttft"] is not None
    (finalist,) = printed["finalists"]
    hits = next(f for f in finalist["figures"] if f["path"] == "prefix_cache.hit_rate")
    assert finalist["winner"] and hits["verdict"] == "better"
    assert 'status = "confirmed"' in recipe.read_text()
    verified = kvtune("recipe", "verify", str(recipe), "-o", str(tmp_path), "--json")
    assert verified["holds"] and verified["on"] == "engine"


def test_a_sweep_on_both_keeps_what_failed(tmp_path: Path) -> None:
    load = "rounds:prefixes=3,prefix=600,suffix=32,output=4,rounds=2"
    printed = kvtune(
        *("sweep", "tiny-gemma3", "-w", load, "--set", "max_num_batched_tokens=512,16", "--on", "both"),
        *("-o", str(tmp_path), "--json", *FLAGS, "--max-num-seqs", "64"),
    )
    by_place = {on: [t for t in printed["trials"] if t["on"] == on] for on in ("sim", "engine")}
    for trials in by_place.values():
        assert [t["state"] for t in trials] == ["complete", "failed"]
        assert trials[1]["why"], "fewer tokens a step than requests in it: vLLM refuses"
    assert printed["verdict"]["on"] == "engine"
    assert printed["baseline"]["on"] == "engine"
