"""A lab runs a set-up where its device says, and is what commands are handed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.platforms import Platform
from kvtune.lab.engine.profile import Profiled
from kvtune.lab.lab import Lab, Replaying
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.simulators import Simulators
from tests.labs import FakeLab
from tests.simulator import run


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


def test_the_replays_of_several_searches_share_a_simulator_until_the_block_ends() -> None:
    events: list[str] = []

    class Counting(Lab):
        @contextmanager
        def simulators(self, model: str = "", platform: Platform | None = None) -> Iterator[Simulators]:
            events.append(f"start {model}")
            yield Simulators(model=model)
            events.append(f"end {model}")

    with Replaying(Counting()) as lab:
        for model in ("a", "a", "b", "a"):
            with lab.simulators(model) as simulators:
                assert isinstance(simulators, Simulators)
        assert events == ["start a", "start b"]
    assert events == ["start a", "start b", "end b", "end a"]
