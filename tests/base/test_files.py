"""Files are written whole or not at all, whatever stops the writer."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.base.files import appending, claim, creating, explained, home_folder, replacing
from kvtune.servers.watch.facts import events_words

Put = Callable[[Path], AbstractContextManager[IO[bytes]]]


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with replacing(target) as part:
        part.write(b"new")
        assert target.read_text() == "old"
        assert len(list(tmp_path.iterdir())) == 2, "a rename across file systems would be a copy"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError(), KeyboardInterrupt()])
def test_a_writer_that_is_stopped_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(type(error)), replacing(target) as part:
        part.write(b"half")
        raise error
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


def test_a_rename_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    folder = tmp_path / "a.json"
    folder.mkdir()
    with pytest.raises(OSError), replacing(folder) as part:
        part.write(b"new")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("put", [replacing, creating])
def test_a_link_is_not_written_through(tmp_path: Path, put: Put) -> None:
    kept, link = tmp_path / "kept", tmp_path / "a.json"
    kept.write_text("mine")
    link.symlink_to(kept)
    with pytest.raises(OSError, match=r"it is a link|File exists"), put(link) as part:
        part.write(b"new")
    assert kept.read_text() == "mine" and link.is_symlink()


def special(folder: Path) -> dict[str, Path]:
    """A path of each kind that is neither a file nor a link, and a link to a device."""
    made = {name: folder / name for name in ("folder", "pipe", "socket", "link")}
    made["folder"].mkdir()
    os.mkfifo(made["pipe"])
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(str(made["socket"]))
    made["link"].symlink_to("/dev/null")
    return {**made, "device": Path("/dev/null")}


@pytest.mark.parametrize("name", ["folder", "pipe", "socket", "link", "device"])
def test_nothing_but_a_regular_file_is_replaced_or_added_to(tmp_path: Path, name: str) -> None:
    """`-o /dev/null --force` made a file of the container's /dev/null."""
    path = special(tmp_path)[name]
    before = path.lstat()
    with pytest.raises(OSError, match=f"it is a {name}"), replacing(path) as part:
        part.write(b"new")
    with pytest.raises(OSError, match=f"it is a {name}"):
        appending(path)
    with pytest.raises(FileExistsError), creating(path) as part:
        part.write(b"new")
    with pytest.raises(FileExistsError):
        claim(path)
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert not list(tmp_path.glob(".kvtune-*"))


def test_what_takes_the_name_while_the_file_is_written_is_not_replaced_either(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    with pytest.raises(OSError, match="it is a pipe"), replacing(target) as part:
        os.mkfifo(target)
        part.write(b"new")
    assert target.is_fifo()


@pytest.mark.parametrize("put", [replacing, creating])
def test_a_private_file_is_readable_by_its_user_alone_all_the_time(tmp_path: Path, put: Put) -> None:
    target, before = tmp_path / "a.json", os.umask(0)
    if put is replacing:
        target.write_text("old")
        target.chmod(0o644)
    try:
        with put(target, private=True) as part:  # type: ignore[call-arg]
            assert os.fstat(part.fileno()).st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_private_file_that_is_added_to_becomes_its_users_alone(tmp_path: Path) -> None:
    target = tmp_path / "a.jsonl"
    target.write_text("old\n")
    target.chmod(0o644)
    with appending(target, private=True) as file:
        file.write(b"new\n")
    assert target.read_text() == "old\nnew\n" and target.stat().st_mode & 0o777 == 0o600


def test_a_killed_writers_file_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, young, foreign, other = (
        tmp_path / name
        for name in (
            ".kvtune-0000000000000000.part",
            ".kvtune-1111111111111111.part",
            ".kvtune-x.part",
            "2.part",
        )
    )
    for path in (left, young, foreign, other):
        path.write_text("half")
        if path is not young:
            os.utime(path, (0, 0))
    with replacing(tmp_path / "a") as part:
        os.utime(part.fileno(), (0, 0))  # its writer is alive, however long it takes
        with replacing(tmp_path / "b"):
            pass
    assert not left.exists() and young.exists() and foreign.exists() and other.exists()
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_a_new_file_takes_nobodys_name_however_late_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _refused)
    target = tmp_path / "a.json"
    with pytest.raises(FileExistsError), creating(target) as part:
        part.write(b"new")
        target.write_text("mine")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "mine")]
    target.unlink()
    with creating(target) as part:
        part.write(b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]


def _refused(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_the_temporary_file_has_a_name_that_nobody_can_lay_a_link_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one who could: what has the name already is not opened."""
    kept, target = tmp_path / "kept", tmp_path / "a.json"
    kept.write_text("mine")
    names: set[str] = set()
    for _ in range(2):
        with replacing(target) as part:
            names |= {path.name for path in tmp_path.iterdir()} - {"kept", "a.json"}
            part.write(b"new")
    assert len(names) == 2 and not any(str(os.getpid()) == name.split(".")[-2] for name in names)
    monkeypatch.setattr("kvtune.base.files.token_hex", lambda n: "guessed")
    (tmp_path / ".kvtune-guessed.part").symlink_to(kept)
    with pytest.raises(FileExistsError), replacing(target) as part:
        part.write(b"newer")
    assert kept.read_text() == "mine" and target.read_text() == "new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions_and_is_never_more_open(
    tmp_path: Path, mode: int
) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    target.chmod(mode)
    with replacing(target) as part:
        assert os.fstat(part.fileno()).st_mode & 0o777 == mode
        part.write(b"new")
    assert target.stat().st_mode & 0o777 == mode and target.read_text() == "new"


@pytest.mark.parametrize("put", [replacing, creating])
def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path, put: Put) -> None:
    before = os.umask(0o027)
    try:
        with put(tmp_path / "a.json") as part:
            part.write(b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


KILLED = """
import os, sys
from pathlib import Path
from kvtune.base import files
def kill(*_): os.kill(os.getpid(), 9)
Path.replace = os.link = kill
with getattr(files, sys.argv[2])(Path(sys.argv[1])) as part:
    part.write(b"new")
"""


@pytest.mark.parametrize("put", ["replacing", "creating"])
def test_a_kill_between_write_and_rename_leaves_what_was_there(tmp_path: Path, put: str) -> None:
    target = tmp_path / "a.json"
    if put == "replacing":
        target.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), put], check=False)
    assert done.returncode == -signal.SIGKILL
    assert target.exists() == (put == "replacing") and (put == "creating" or target.read_text() == "old")
    left = [path.name for path in tmp_path.iterdir() if path != target]
    assert [name.startswith(".kvtune-") and name.endswith(".part") for name in left] == [True]


def test_the_error_names_the_file_and_the_reason(tmp_path: Path) -> None:
    target = tmp_path / "no folder" / "a.toml"
    with (
        pytest.raises(KvtuneError, match=r"cannot write the recipe .*a\.toml: No such file") as caught,
        explained(target, "choose another place", "the recipe"),
        replacing(target) as part,
    ):
        part.write(b"new")
    assert caught.value.hint == "choose another place"
    with pytest.raises(KvtuneError, match=f"cannot write {target}: No such file"), explained(target, "hint"):
        target.write_text("new")


def test_errors_of_other_kinds_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), explained(tmp_path, "hint"):
        raise ValueError("mine")


def test_a_user_without_a_home_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert home_folder() is None
    flags, options = events_words("http://localhost:8000")
    assert "tcp://*:5557" in flags[1] and options == []


def test_nobody_else_asks_for_the_home_folder() -> None:
    root = Path(__file__).parents[2] / "kvtune"
    found = [p.name for p in root.rglob("*.py") if "Path.home()" in p.read_text(encoding="utf-8")]
    assert found == ["files.py"]
