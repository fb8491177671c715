"""The run file: round trips, old and broken files, failed writes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.run import file as file_module
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import (
    AT_MOST,
    SCHEMA,
    TABLES,
    CoreInfo,
    EngineInfo,
    Header,
    HostInfo,
    Run,
    Table,
    WorkloadInfo,
    empty_table,
)


def header() -> Header:
    return Header(
        kvtune="0",
        source="engine",
        started_at="2026-01-01T00:00:00+00:00",
        command=["kvtune", "profile", "<m> & co"],
        model="m",
        workload=WorkloadInfo(
            name="decode", spec="decode", params={"requests": 1}, seed=0, hash="h", requests=1
        ),
        core=CoreInfo(name="stock"),
        engine=EngineInfo(vllm="0.32.0"),
        python="3.11.7",
        host=HostInfo(cores=2),
    )


def table(name: str, rows: int) -> Table:
    return {
        column: np.array([f"é{i}" for i in range(rows)], dtype=np.str_)
        if kind == "U"
        else np.arange(rows).astype(kind) % (AT_MOST.get((name, column), 100) + 1)
        for column, kind in TABLES[name].items()
    }


@given(rows=st.integers(0, 20))
def test_every_table_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: int) -> None:
    path = tmp_path_factory.mktemp("run") / "a.kvrun"
    run = Run(header(), {name: table(name, rows) for name in TABLES})
    write_run(run, path)
    back = read_run(path)
    assert back.header == run.header
    for name, columns in run.tables.items():
        for column, values in columns.items():
            assert back.tables[name][column].tolist() == values.tolist()
    assert [p.name for p in path.parent.iterdir()] == ["a.kvrun"]


def test_a_table_that_was_not_recorded_is_empty(tmp_path: Path) -> None:
    write_run(Run(header()), tmp_path / "a.kvrun")
    read = read_run(tmp_path / "a.kvrun")
    assert read.tables == {}
    assert set(read.table("steps")) == set(TABLES["steps"]) and len(read.table("steps")["t_s"]) == 0


def test_a_column_that_the_writer_did_not_know_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrun"
    write_run(Run(header(), {"requests": table("requests", 3)}), path)
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "b.kvrun", "w") as less:
        for name in whole.namelist():
            if not name.endswith(("preemptions.npy", "sent_s.npy", "kind.npy")):
                less.writestr(name, whole.read(name))
    requests = read_run(tmp_path / "b.kvrun").table("requests")
    assert requests["preemptions"].tolist() == [0, 0, 0]
    assert np.isnan(requests["sent_s"]).all()
    assert requests["kind"].tolist() == ["", "", ""]


def test_numpy_and_zip_alone_can_read_it(tmp_path: Path) -> None:
    write_run(Run(header(), {"gc": table("gc", 2)}), tmp_path / "a.kvrun")
    with zipfile.ZipFile(tmp_path / "a.kvrun") as archive:
        assert json.loads(archive.read("header.json"))["model"] == "m"
        with archive.open("tables/gc/pause_us.npy") as member:
            assert np.load(member, allow_pickle=False).tolist() == [0.0, 1.0]


def rewrite_header(path: Path, **changes: object) -> None:
    fields = json.loads(msgspec.json.encode(header())) | changes
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("header.json", json.dumps(fields))


def test_a_newer_schema_asks_for_a_newer_kvtune(tmp_path: Path) -> None:
    rewrite_header(tmp_path / "a.kvrun", schema=SCHEMA + 1)
    with pytest.raises(UsageError, match=f"schema {SCHEMA + 1}") as caught:
        read_run(tmp_path / "a.kvrun")
    assert "upgrade kvtune" in caught.value.hint


def test_an_older_schema_is_upgraded_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite_header(tmp_path / "a.kvrun", schema=SCHEMA - 1, model="old name")
    monkeypatch.setitem(file_module.UPGRADES, SCHEMA - 1, lambda old: {**old, "model": "new name"})
    assert read_run(tmp_path / "a.kvrun").header.model == "new name"


def test_a_write_that_fails_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(KvtuneError, match="No space left") as caught:
        write_run(Run(header(), {"gc": empty_table("gc")}), tmp_path / "a.kvrun")
    assert "-o DIR" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
