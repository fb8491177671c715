"""Tuning in a GPU engine's shape, where no GPU is: stock and finalists run on a simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtune.data.recipe import read_recipe
from kvtune.data.run.file import read_run

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1500)]

LOAD = "rounds:prefixes=8,prefix=1500,suffix=64,output=8,rounds=3"


DECODES = "decode:requests=128,prompt=16,output=150"


def kvtune(folder: Path, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "kvtune", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_a_recipe_that_is_tuned_on_a_device_that_only_takes_time_holds_there(tmp_path: Path) -> None:
    search = ("--trials", "6", "--finalists", "1", "--rounds", "2", "--recipe", "r.toml", "-o", "o", "--json")
    study = json.loads(kvtune(tmp_path, "tune", "tiny-gemma3", "-w", LOAD, "--on", "host", *search))
    assert study["verdict"]["winner"] and study["verdict"]["on"] == "engine"
    recipe = read_recipe(tmp_path / "r.toml")
    assert recipe.recipe.device == "timed" and recipe.evidence["engine_on"] == "host"
    runs = [read_run(path) for path in (tmp_path / "o").glob("*.kvrun")]
    assert runs and all(run.header.engine.async_scheduling for run in runs)
    assert {recipe.evidence["block_tokens"], recipe.evidence["pool"]["block_tokens"]} == {16}
    checked = json.loads(kvtune(tmp_path, "recipe", "verify", "r.toml", "--rounds", "2", "-o", "o", "--json"))
    assert checked["holds"] and checked["on"] == "engine", checked


def test_a_sweep_on_the_host_alone_compares_intervals_by_the_ceiling(tmp_path: Path) -> None:
    knob = ("--set", "stream_interval=1,16", "--objective", "ceiling")
    flags = ("-o", "o", "--json", "--", "--max-num-seqs", "128")
    study = json.loads(kvtune(tmp_path, "sweep", "tiny-opt", "-w", DECODES, "--on", "host", *knob, *flags))
    assert [trial["settings"] for trial in study["trials"]] == [
        {"stream_interval": 1},
        {"stream_interval": 16},
    ]
    for trial in (study["baseline"], *study["trials"]):
        assert trial["on"] == "engine" and trial["engine"]["device"] == "timed"
        assert trial["output_tokens"] == 128 * 150 and trial["ceiling"]["tokens_s"] > 0
    intervals = [trial["engine"]["settings"]["stream_interval"] for trial in study["trials"]]
    assert intervals == [1, 16]
    assert study["verdict"]["objective"] == "ceiling" and study["best"] is not None
