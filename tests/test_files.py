"""Files are written whole or not at all, whatever stops the writer."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import pytest

from kvtune.errors import KvtuneError
from kvtune.files import creating, explained, replacing

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
    with contextlib.suppress(FileExistsError), put(link) as part:
        part.write(b"new")
    assert kept.read_text() == "mine"
    assert link.is_symlink() == (put is creating)
    assert link.read_text() == ("mine" if put is creating else "new")


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
    monkeypatch.setattr("kvtune.files.token_hex", lambda n: "guessed")
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
from kvtune import files
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
