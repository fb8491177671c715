"""`kvtune runs`, and `last` in every command that takes a run."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path

import msgspec
import pytest

from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run
from tests.cli.terminal import KVTUNE, bare, on_a_terminal, shown
from tests.simulator import run

GOLDEN = Path(__file__).parents[1] / "golden"
ADDED = ("real", "rounds", "partial", "failed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder, named by KVTUNE_OUTPUT, with four runs; `real` began last, though its file is the oldest."""
    made = tmp_path / "out"
    (made / "sub").mkdir(parents=True)
    for number, name in enumerate(ADDED):
        place = made / "sub" if name == "failed" else made
        recorded = read_run(GOLDEN / f"schema1-{name}.kvrun")
        header = msgspec.structs.replace(recorded.header, started_at=f"2026-11-2{9 - number}T10:00:00+00:00")
        write_run(Run(header, recorded.tables), place / f"{name}.kvrun")
    (made / ".kvtune-hidden").mkdir()
    shutil.copy(made / "real.kvrun", made / ".kvtune-hidden" / "measuring.kvrun")
    monkeypatch.setenv("KVTUNE_OUTPUT", str(made))
    monkeypatch.chdir(tmp_path)
    return made


def test_runs_lists_the_newest_first_with_what_tells_them_apart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [Path(row["file"]).stem for row in rows] == list(ADDED)
    assert [row["state"] for row in rows] == ["complete", "complete", "partial", "failed"]
    expected = ("tiny-gemma3", "rounds", "stock", "engine")
    assert tuple(rows[1][name] for name in ("model", "workload", "core", "source")) == expected
    assert run(["report", str(folder / "rounds.kvrun"), "--console"]) == 0
    told = capsys.readouterr().out
    assert f"{rows[1]['hit_rate']:.1%}".replace("%", " %") in told
    assert f"{rows[1]['ttft_ms_mean']:.3g} ms" in told


def test_runs_of_one_state_are_listed_alone_under_their_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "--state", "partial"]) == 0
    headline, _, _, head, row = capsys.readouterr().out.strip().splitlines()[:5]
    assert headline.startswith("1 partial run in ") and headline.endswith(str(folder)[-60:])
    assert head.startswith("run ") and row.startswith("last~2 ")


@pytest.mark.parametrize(
    "argv",
    [
        ["report", "last", "--console"],
        ["report", "last"],
        ["export", "last", "--perfetto"],
        ["explain", "last~3"],
        ["compare", "last~1", "last~1"],
        ["runs", "last"],
    ],
)
def test_last_names_the_newest_run_in_every_command_that_takes_one(
    folder: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(argv)
    complaint = capsys.readouterr().err
    named = {"last": "real.kvrun", "last~1": "rounds.kvrun", "last~3": "sub/failed.kvrun"}
    assert f"{argv[1]} is {folder / named[argv[1]]}\n" in complaint
    assert (
        code == 0 or argv[0] == "explain"
    )  # a run that failed before its first request has nothing to replay


def test_last_without_a_run_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTUNE_OUTPUT", str(tmp_path / "empty"))
        assert run(["explain", "last"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "empty") in first and "KVTUNE_OUTPUT" in second


def test_delete_asks_and_removes_a_run_with_its_page_and_exports(folder: Path) -> None:
    for argv in (["report", "last~1"], ["export", "last~1", "--csv"]):
        assert run(argv) == 0
    count = 2 + len(list((folder / "rounds.csv").iterdir()))
    (folder / "rounds.txt").write_text("a person's notes")
    environment = bare(KVTUNE_OUTPUT=str(folder))
    for answer, left in (("n", True), ("y", False)):
        with on_a_terminal((*KVTUNE, "runs", "--delete", "last~1"), environment=environment) as terminal:
            question = terminal.until("[y/N]")
            assert f"1 run with pages and exports: {count} files" in " ".join(question.split())
            terminal.type(f"{answer}\r")
            assert terminal.rest()[0] == 0
        assert (folder / "rounds.kvrun").exists() is left
        assert (folder / "rounds.csv").exists() is left
    assert sorted(path.name for path in folder.glob("rounds*")) == ["rounds.txt"]
    assert (folder / "real.kvrun").exists()


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Every path below the folder, with a file's content or a link's target."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_delete_unlinks_links_and_follows_none(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for argv in (["report", "last"], ["export", "last", "--csv"]):
        assert run(argv) == 0
    for name in ("real.html", "real.csv", "real.kvrun"):
        (folder / name).rename(kept / name)
        (folder / name).symlink_to(kept / name)
    before = snapshot(kept)
    assert run(["runs", str(folder / "real.kvrun"), "--delete", "--yes"]) == 0
    assert snapshot(kept) == before and not (folder / "real.kvrun").is_symlink()
    assert (folder / "real.csv").is_symlink() and (folder / "real.html").is_symlink()


def test_delete_takes_no_file_that_is_no_run_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor one that kvtune did not write, or that is cut short, nor a run file of a newer kvtune: that one is whole."""
    newer = (folder / "real.kvrun").read_bytes()
    mine = folder / "mine"
    mine.mkdir()
    with zipfile.ZipFile(mine / "newer.kvrun", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("header.json", json.dumps({"schema": 99, "kvtune": "9.0"}, indent=1))
    (mine / "renamed.txt").write_bytes(newer)
    (mine / "renamed.html").write_text("mine")
    contents = {"a": b"", "b": b"PK", "c": b"mine", "torn": newer[: len(newer) // 2]}
    for name, content in {**{f"{n}.kvrun": c for n, c in contents.items()}, "notes.txt": b"mine"}.items():
        (mine / name).write_bytes(content)
    with zipfile.ZipFile(mine / "zip.kvrun", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("header.json", '{"mine": 1}')
    before = snapshot(mine)
    named = [str(path) for path in mine.iterdir()]
    for argv in ([*named], [str(mine), "--state", "unreadable"], [str(mine)]):
        assert run(["runs", *argv, "--delete", "--yes"]) == 0
        told = capsys.readouterr()
        assert "nothing deleted" in told.out and "newer.kvrun stays: " in told.err
    assert snapshot(mine) == before


def test_delete_names_what_it_cannot_delete_and_deletes_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self.name == "real.kvrun":
            raise PermissionError(1, "Operation not permitted")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert run(["runs", "--delete", "--yes"]) == 1
    monkeypatch.undo()
    assert "real.kvrun: Operation not permitted" in capsys.readouterr().err
    assert [path.name for path in folder.rglob("*.kvrun") if not path.parent.name.startswith(".")] == [
        "real.kvrun"
    ]


def test_delete_without_a_terminal_deletes_nothing_unless_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run(["runs", "--delete"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert (folder / "real.kvrun").exists()
    assert run(["runs", "--state", "failed", "--delete", "--yes"]) == 0
    assert not (folder / "sub" / "failed.kvrun").exists() and (folder / "real.kvrun").exists()


def test_the_list_fits_eighty_columns_with_every_figure(folder: Path) -> None:
    code, text = shown("runs", KVTUNE_OUTPUT=str(folder))
    assert code == 0
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for figure in ("last~3", "tiny-gemma3", "1.08 s", "32.1 %", "12.7 ms", "partial"):
        assert figure in text
    assert "no room for: " in text
