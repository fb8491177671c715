"""Exports against the rules of their formats, for every kind of run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.run.file import read_run
from kvtune.data.run.types import TABLES, Run
from kvtune.reading.report.export.csv import write_csv
from kvtune.reading.report.export.trace import chrome_trace
from tests.golden.make import FOLDER

FILES = sorted(FOLDER.glob("*.kvrun"))

CARRIED = {
    "M": {"args": dict},
    "X": {"ts": (int, float), "dur": (int, float), "cat": str},
    "C": {"ts": (int, float), "args": dict},
    "b": {"ts": (int, float), "id": (int, str), "cat": str},
    "e": {"ts": (int, float), "id": (int, str), "cat": str},
}
"""The Trace Event Format: what an event of each phase must carry, beside its name, process and thread."""
NAMED = {"process_name", "process_sort_index", "thread_name"}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def any_run(request: pytest.FixtureRequest) -> Run:
    return read_run(request.param)


def test_a_chrome_trace_follows_its_format(any_run: Run) -> None:
    trace = json.loads(json.dumps(chrome_trace(any_run), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns") and {*map(type, trace["otherData"].values())} == {str}
    for event in trace["traceEvents"]:
        for name, kind in ({"name": str, "pid": int, "tid": int} | CARRIED[event["ph"]]).items():
            assert isinstance(event[name], kind), event
        assert event.get("dur", 0) >= 0 and isinstance(event.get("args", {}), dict)
        assert event["ph"] != "M" or event["name"] in NAMED
        assert event["ph"] != "C" or ({*map(type, event["args"].values())} <= {int, float} and event["args"])


def test_a_chrome_trace_holds_every_step_collection_and_request(rounds: Run) -> None:
    events = chrome_trace(rounds)["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["name"] == "step"]
    collections = [e for e in events if e.get("cat") == "gc"]
    begun = [e for e in events if e["ph"] == "b" and e["name"] == "request"]
    ended = [e for e in events if e["ph"] == "e" and e["name"] == "request"]
    assert len(steps) == len(rounds.tables["steps"]["t_s"])
    assert len(collections) == len(rounds.tables["gc"]["t_s"])
    assert len(begun) == len(ended) == len(rounds.tables["requests"]["id"])
    assert {e["id"] for e in begun} == {e["id"] for e in ended}
    assert {e["pid"] for e in collections} == {100, 101}
    assert sum(e["dur"] for e in steps) == pytest.approx(rounds.tables["steps"]["step_us"].sum(), rel=1e-6)


def test_phases_of_a_trace_lie_within_their_step(rounds: Run) -> None:
    step = None
    for event in chrome_trace(rounds)["traceEvents"]:
        if event.get("cat") != "step":
            continue
        if event["name"] == "step":
            step = event
        else:
            assert step is not None
            assert event["ts"] >= step["ts"] - 0.01
            assert event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 0.01


def test_a_request_that_never_ended_has_no_end_in_the_trace() -> None:
    from tests.golden.synthetic import partial_run

    run = partial_run()
    events = [e for e in chrome_trace(run)["traceEvents"] if e["name"] == "request"]
    requests = run.tables["requests"]
    assert len([e for e in events if e["ph"] == "b"]) == np.isfinite(requests["sent_s"]).sum()
    assert len([e for e in events if e["ph"] == "e"]) == np.isfinite(requests["finished_s"]).sum()


def test_csv_reads_back_as_the_tables(any_run: Run, tmp_path: Path) -> None:
    written = write_csv(any_run, tmp_path / "csv")
    assert {p.name for p in written} == {"header.json", *(f"{name}.csv" for name in any_run.tables)}
    for name, table in any_run.tables.items():
        with (tmp_path / "csv" / f"{name}.csv").open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        assert len(rows) == len(next(iter(table.values())))
        for column, kind in TABLES[name].items():
            texts = [row[column] for row in rows]
            if kind == "U":
                assert texts == [str(v) for v in table[column]]
            else:
                read = np.array([float(text) if text else np.nan for text in texts])
                np.testing.assert_array_equal(read, np.asarray(table[column], dtype=float))


def test_csv_names_the_processes(rounds: Run, tmp_path: Path) -> None:
    write_csv(rounds, tmp_path / "csv")
    with (tmp_path / "csv" / "gc.csv").open(newline="", encoding="utf-8") as lines:
        assert {row["process_name"] for row in csv.DictReader(lines)} == {"front end", "EngineCore"}


def test_csv_overwrites_nothing_without_force(rounds: Run, tmp_path: Path) -> None:
    folder = tmp_path / "csv"
    write_csv(rounds, folder)
    with pytest.raises(UsageError, match="not empty"):
        write_csv(rounds, folder)
    write_csv(rounds, folder, force=True)


def test_csv_wants_a_folder(rounds: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        write_csv(rounds, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_csv_is_not_written_through_links(rounds: Run, tmp_path: Path) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "csv"
    kept.mkdir()
    (tmp_path / "mine").write_text("mine")
    folder.symlink_to(kept)
    for force in (False, True):
        with pytest.raises(UsageError, match="is a link"):
            write_csv(rounds, folder, force=force)
    folder.unlink()
    folder.mkdir()
    for name in ("steps.csv", "header.json"):
        (folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match=r"steps\.csv: it is a link"):
        write_csv(rounds, folder, force=True)
    assert (tmp_path / "mine").read_text() == "mine" and not list(kept.iterdir())
    assert len(list(folder.iterdir())) == 2, "nothing was written"


def test_a_full_disk_leaves_the_folder_as_it_was(
    rounds: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the next try is not refused because of half an export."""
    folder = tmp_path / "csv"
    folder.mkdir()
    (folder / "steps.csv").write_text("mine")

    def full(run: Run, name: str, path: Path) -> None:
        path.write_text("half")
        if name == "steps":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtune.reading.report.export.csv.write_table", full)
    with pytest.raises(KvtuneError, match="No space"):
        write_csv(rounds, folder, force=True)
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("steps.csv", "mine")]
