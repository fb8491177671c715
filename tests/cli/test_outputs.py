"""Outputs of commands: no device, pipe or link becomes a file, and what may hold prompts is its user's alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.explain.log import write_log
from kvtune.base.errors import KvtuneError
from kvtune.data.run.extras import TextAccount
from kvtune.data.run.file import read_run, store_extra, write_run
from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.screen import View
from tests.golden.synthetic import replace_header, rounds_run
from tests.simulator import run as kvtune

ROW = Logged(line=1, name="a", prompt=[1, 2], answer=[3], output_tokens=1, salt="s3cret")


@pytest.fixture(autouse=True)
def open_umask() -> Any:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
@pytest.mark.parametrize("kind", ["device", "pipe", "link"])
def test_a_page_replaces_no_device_pipe_or_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, force: list[str]
) -> None:
    write_run(rounds_run(), tmp_path / "a.kvrun")
    target = Path("/dev/null") if kind == "device" else tmp_path / "out.html"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "link":
        target.symlink_to(tmp_path / "mine")
    before = target.lstat()
    for command in (["report"], ["export", "--perfetto"], ["export", "--csv"]):
        assert kvtune([*command, str(tmp_path / "a.kvrun"), "-o", str(target), *force]) == 2
        said = capsys.readouterr().err
        assert "is a" in said and str(target) in said and "unexpected" not in said and "--force" not in said
    assert (target.lstat().st_ino, target.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert not (tmp_path / "mine").exists()


def test_a_mended_log_is_written_through_no_link_whole_or_not_at_all_and_for_its_user_alone(
    tmp_path: Path,
) -> None:
    link, target = tmp_path / "link", tmp_path / "mended.jsonl"
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(KvtuneError, match="File exists"):
        write_log(link, [ROW])
    assert not (tmp_path / "victim").exists()
    broken: Any = [ROW, None]
    with pytest.raises(AttributeError):
        write_log(target, broken)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
    write_log(target, [ROW])
    assert target.stat().st_mode & 0o777 == 0o600 and "s3cret" in target.read_text()


def test_a_recording_and_texts_of_prompts_are_for_their_user_alone(tmp_path: Path) -> None:
    run = rounds_run()
    server = replace_header(run, source="server")
    texts = run.with_extra(texts=TextAccount(with_text=True))
    for name, made, mode in (("plain", run, 0o666), ("server", server, 0o600), ("texts", texts, 0o600)):
        path, page = tmp_path / f"{name}.kvrun", tmp_path / f"{name}.html"
        write_run(made, path)
        assert kvtune(["report", str(path), "-o", str(page)]) == 0
        assert kvtune(["export", "--csv", str(path), "-o", str(tmp_path / name)]) == 0
        for file in (path, page, *(tmp_path / name).iterdir()):
            assert file.stat().st_mode & 0o777 == mode, file
    plain = tmp_path / "plain.kvrun"
    store_extra(plain, texts=TextAccount(with_text=False))
    assert plain.stat().st_mode & 0o777 == 0o666
    store_extra(plain, texts=TextAccount(with_text=True))
    assert plain.stat().st_mode & 0o777 == 0o600 and read_run(plain).private


def test_the_live_views_snapshot_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: form)
    name, victim = tmp_path / "kvtune-watch-%Y%m%d-%H%M%S.json", tmp_path / "victim"
    victim.write_text("mine")
    name.symlink_to(victim)
    screen: Any = object.__new__(View)
    screen._folder, screen._said = tmp_path, ""
    screen._press("w", TextAccount())
    assert victim.read_text() == "mine" and "cannot write" in screen._said
    name.unlink()
    screen._press("w", TextAccount())
    assert name.stat().st_mode & 0o777 == 0o600 and screen._said == f"wrote {name}"


@pytest.mark.parametrize(
    ("words", "name", "what"),
    [
        (["profile", "tiny-llama"], "a.kvrun", "a folder"),
        (["sweep", "tiny-llama", "--pin"], "study.jsonl", "a folder"),
        (["tune", "tiny-llama"], "recipe.toml", "a folder"),
        (["recipe", "export", "tiny-gemma3-cpu"], "config.json", "a folder"),
        (["report", "{run}"], "b.kvrun", "a page"),
        (["explain", "{run}", "--page"], "b.jsonl", "a page"),
        (["export", "--csv", "{run}"], "b.kvrun", "a trace, or a folder"),
        (["tap", "http://127.0.0.1:1"], "a.kvrun", "a log"),
        (["record", "http://127.0.0.1:1"], "a.html", "a run file"),
    ],
)
def test_a_name_of_another_kind_of_file_is_refused_and_nothing_is_made(
    words: list[str], name: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.kvrun"
    write_run(rounds_run(), run)
    words = [word.format(run=run) for word in words]
    assert kvtune([*words, *([] if words[-1] == "--page" else ["-o"]), str(tmp_path / name)]) == 2
    assert f"{name}: what is written here is {what}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.kvrun"]


def test_a_folder_that_is_there_may_be_called_as_it_likes(tmp_path: Path) -> None:
    from kvtune.cli.options import new_folder

    (tmp_path / "a.kvrun").mkdir()
    assert new_folder(str(tmp_path / "a.kvrun")) == tmp_path / "a.kvrun"
    assert new_folder(str(tmp_path / "runs.v2")) == tmp_path / "runs.v2"
