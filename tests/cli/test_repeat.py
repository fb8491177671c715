"""`profile --repeat`: what is shown of the runs that ended when one fails or Ctrl-C stops it. No engine starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.run.file import read_run
from kvtune.lab.engine.profile import Profiled
from kvtune.lab.setup.setup import Setup
from tests.labs import FakeLab
from tests.simulator import run

GOLDEN = Path(__file__).parents[1] / "golden" / "schema1-rounds.kvrun"


@pytest.mark.full
@pytest.mark.parametrize("code", [0, 1, 130])
def test_runs_that_ended_are_shown_whatever_comes_after(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: Iterator[tuple[int, int]] = enumerate([0, 0, code])

    def profiled(setup: Setup, output: Path) -> Profiled:
        number, failed = next(codes)
        if failed:
            raise KvtuneError("the engine did not start", "", failed)
        return Profiled(read_run(GOLDEN), tmp_path / f"{number}.kvrun", None)

    words = ["profile", "tiny-gemma3", "--repeat", "3", "--tries", "0", "--json", "-o", str(tmp_path)]
    assert run(words, FakeLab(profiled)) == code
    out, err = capsys.readouterr()
    assert len(json.loads(out)["repeats"]) == (2 if code else 3)
    assert ("the engine did not start" in err) == bool(code)
