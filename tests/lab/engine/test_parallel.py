"""Engines of several processes on the CPU: two that share a load, and one whose model is split over two workers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvtune.data.run.engines import ranks, served_by
from kvtune.lab.engine.profile import BINDING
from tests.lab.engine.real import counts_as_vllm, kvtune, profiled

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

LOAD = "rounds:prefixes=4,prefix=400,suffix=32,output=8,rounds=2"
SMALL = ("--num-gpu-blocks-override", "200", "--max-model-len", "1024")


def test_two_engines_that_share_a_load(tmp_path: Path) -> None:
    """Each request has its engine, each engine its steps and its state; the replay of each hits what it hit."""
    ran = profiled(tmp_path, "tiny-llama", "-w", LOAD, engine=("--data-parallel-size", "2", *SMALL))
    run = ran.run
    counts_as_vllm(ran)
    assert ranks(run) == [0, 1] and run.header.engine.engines == 2
    assert served_by(run, 0).any() and served_by(run, 1).any()
    assert {"engine_core_0", "engine_core_1"} <= set(ran.facts["gc"])
    assert len(set(run.table("steps")["process"].tolist())) == 2
    assert run.header.core.active and run.header.core.parts["steady"]
    asked = kvtune("explain", ran.facts["run_file"], "--json", output=tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["differing_requests"] == 0, asked.stdout[-2000:]


def test_one_engine_over_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvtune gives each worker its own CPUs, and both report their core."""
    monkeypatch.delenv(BINDING, raising=False)
    ran = profiled(tmp_path, "tiny-llama", "-w", LOAD, engine=("--tensor-parallel-size", "2", *SMALL))
    run = ran.run
    counts_as_vllm(ran)
    assert [p.role for p in run.header.processes].count("worker") == 2
    assert run.header.core.active and run.header.core.parts["rows"]
    assert any(BINDING in note for note in run.header.notes)
    hits = run.table("requests")["hit_tokens"]
    assert np.count_nonzero(hits > 0) >= 4  # the second round
