"""A lab runs a set-up where its device says, and is what commands are handed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtune.engine.profile import Profiled
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
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
