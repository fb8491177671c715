"""How long runs took on this machine, read from run files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.data.run.durations import Known, known_durations
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.machine import this_host
from kvtune.data.run.types import Run

GOLDEN = read_run(Path(__file__).parents[2] / "golden" / "schema1-rounds.kvrun")
LOAD = GOLDEN.header.workload.hash


def add(folder: Path, name: str, **values: Any) -> None:
    fields = {"host": this_host(), "source": "engine", "startup_s": 20.0, "wall_s": 10.0, **values}
    write_run(Run(msgspec.structs.replace(GOLDEN.header, **fields), {}), folder / f"{name}.kvrun")


def test_a_run_of_the_same_model_and_load_gives_the_time_of_the_next(tmp_path: Path) -> None:
    for number, wall_s in enumerate((8.0, 10.0, 90.0)):
        add(tmp_path, f"run{number}", wall_s=wall_s)
    assert known_durations(tmp_path, "tiny-gemma3", LOAD) == Known(run_s=30.0, start_s=20.0)


@pytest.mark.parametrize(
    "other",
    [
        {"host": msgspec.structs.replace(this_host(), cpu="another CPU")},
        {"host": msgspec.structs.replace(this_host(), cores=1234)},
        {"source": "sim"},
        {"source": "host"},
    ],
)
def test_runs_of_other_machines_and_of_the_simulator_say_nothing(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    add(tmp_path, "other", **other)
    assert known_durations(tmp_path, "tiny-gemma3", LOAD) == Known()


def test_runs_on_a_device_that_only_takes_time_are_of_their_own(tmp_path: Path) -> None:
    add(tmp_path, "host", source="host", wall_s=2.0)
    assert known_durations(tmp_path, "tiny-gemma3", LOAD, "host") == Known(run_s=22.0, start_s=20.0)


def test_another_load_or_model_gives_the_time_of_a_start_alone(tmp_path: Path) -> None:
    add(tmp_path, "partial", state="partial")
    assert known_durations(tmp_path, "tiny-gemma3", LOAD) == Known(start_s=20.0)
    add(tmp_path, "one")
    assert known_durations(tmp_path, "tiny-gemma3", "other load") == Known(start_s=20.0)
    add(tmp_path, "two", startup_s=40.0, model="big")
    assert known_durations(tmp_path, "tiny-gemma3", "other load") == Known(start_s=20.0)
    assert known_durations(tmp_path, "big", LOAD).start_s == 40.0
    assert known_durations(tmp_path, "new", LOAD).start_s == 20.0  # the median of 20, 20 and 40


def test_a_folder_that_is_not_there_and_a_torn_file_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "torn.kvrun").write_bytes(b"PK")
    assert known_durations(tmp_path, "m", LOAD) == Known()
    assert known_durations(tmp_path / "none", "m", LOAD) == Known()
