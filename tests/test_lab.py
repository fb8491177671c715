"""A lab runs a set-up where its device says, and is what commands are handed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtune.engine.profile import Profiled
from kvtune.engine.setup import Load, Setup, Simulated
from kvtune.errors import KvtuneError
from kvtune.fake_device.settings import nominal
from kvtune.run.file import read_run
from kvtune.workload.spec import build
from tests.labs import FakeLab
from tests.simulator import SHARED, run

GOLDEN = Path(__file__).parent / "golden" / "schema1-rounds.kvrun"


def test_real_and_timed_devices_have_the_engines_bench(tmp_path: Path) -> None:
    asked: list[Setup] = []

    def answer(setup: Setup, output: Path) -> Profiled:
        asked.append(setup)
        assert output == tmp_path
        return Profiled(read_run(GOLDEN), GOLDEN, None)

    lab = FakeLab(answer)
    for setup in (Setup(model="m"), Setup(model="m", device=nominal())):
        assert lab.run(setup, tmp_path).path == GOLDEN
        assert asked.pop() == setup


@pytest.mark.vllm
def test_simulated_devices_have_the_simulator(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    load = Load.of(build("decode:requests=2,prompt=16,output=4"), {"ttft": 1e9})
    done = SHARED.run(Setup(model="tiny-opt", load=load, device=Simulated()), tmp_path)
    assert done.error is None and done.path.parent == tmp_path and done.path.name.endswith("_sim.kvrun")
    assert done.run.header.source == "sim" and read_run(done.path).header.extra.slo == {"ttft": 1e9}


def test_a_command_runs_in_the_lab_that_it_is_handed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def answer(setup: Setup, output: Path) -> Profiled:
        asked.append(setup.engine_args)
        raise KvtuneError("no engine in this lab", "take another")

    words = ["profile", "tiny-opt", "-o", str(tmp_path), "--", "--max-num-seqs", "8"]
    assert run(words, FakeLab(answer)) == 1
    assert asked == [["--max-num-seqs", "8"]] and "no engine in this lab" in capsys.readouterr().err
