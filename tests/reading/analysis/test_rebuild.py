"""A run's workload is made again without opening a file that the run names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtune.base.errors import UsageError
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run
from kvtune.reading.analysis.rebuild import rebuilt, workload_of
from kvtune.requests.loads.spec import build, traced
from tests.simulator import run as kvtune

GOLDEN = Path(__file__).parents[2] / "golden"


def sent(spec: str, requests: int = 3) -> Run:
    """A run that says that it sent this workload."""
    run = read_run(GOLDEN / "schema1-rounds.kvrun")
    info = msgspec.structs.replace(run.header.workload, name="trace", spec=spec, hash="")
    table = {name: column[:requests] for name, column in run.table("requests").items()}
    header = msgspec.structs.replace(run.header, workload=info)
    return Run(header, {"requests": table})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a,b.jsonl"
    line = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    path.write_text(f"{json.dumps(line)}\n" * 3)
    return path


@pytest.mark.parametrize("command", [["report"], ["report", "--console"], ["compare", "--json"], ["explain"]])
def test_no_command_opens_a_path_of_a_run_file(tmp_path: Path, command: list[str], trace: Path) -> None:
    """The path is a pipe: opening it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    write_run(sent(f"trace:path={tmp_path / 'pipe'}"), tmp_path / "a.kvrun")
    files = [str(tmp_path / "a.kvrun")] * (2 if command[0] == "compare" else 1)
    assert kvtune([command[0], *files, *command[1:]]) == (2 if command[0] == "explain" else 0)


def test_not_even_a_trace_that_is_there(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sent(f"trace:path={trace}")
    with pytest.raises(UsageError, match="no path that a file names is opened") as caught:
        rebuilt(run)
    assert "--trace FILE" in caught.value.hint
    assert workload_of(run) is None


def test_the_users_trace_is_read_with_the_keys_of_the_run(trace: Path) -> None:
    workload = rebuilt(sent("trace:limit=2,path=/etc/passwd,and,more,speed=2"), trace)
    assert len(workload.requests) == 2 and str(trace) in workload.spec and "passwd" not in workload.spec
    assert traced("trace:path=/x", Path("y")) == "trace:path=y"


def test_a_trace_that_is_another_is_refused(trace: Path) -> None:
    run = sent("trace:path=/x")
    other = msgspec.structs.replace(run.header.workload, hash="00")
    run = Run(msgspec.structs.replace(run.header, workload=other), run.tables)
    with pytest.raises(UsageError, match="has changed"):
        workload_of(run, trace)
    with pytest.raises(UsageError, match="reads no trace"):
        workload_of(sent("rounds"), trace)


def test_a_header_asks_for_no_more_requests_than_its_tables_have() -> None:
    for spec in ("decode:requests=5m", "rounds:rounds=1m", "chat:sessions=1,turns=1m"):
        assert workload_of(sent(spec)) is None
    run = sent("decode:requests=3")
    assert workload_of(run) == build("decode:requests=3")
    assert np.isfinite(run.table("requests")["sent_s"]).all()


@pytest.mark.parametrize("spec", ["zipf:prefixes=100m,requests=3", "mix:prefixes=100m,requests=3"])
def test_popularities_of_endless_prefixes_are_not_made(spec: str) -> None:
    assert workload_of(sent(spec)) is None


def test_a_chat_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(UsageError, match=r"are prompts of 1,000,000,000,000 parts, 86.4 TiB of memory"):
        build("chat:sessions=1,turns=1m")
