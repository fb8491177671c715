"""kvtune's own folders are removed when their processes end, however they end; nothing else is ever touched."""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtune.base import scratch as module
from kvtune.base.errors import KvtuneError
from kvtune.base.scratch import HIDDEN, LINE, MARK, hold, leave, make, scratch, share, sweep

PACKAGE = Path(__file__).parents[2] / "kvtune"


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


USER = """
import sys, time
from pathlib import Path
from kvtune.base.scratch import make
make(Path(sys.argv[1]))
print(flush=True)
time.sleep(600)
"""


def user_of(folder: Path) -> subprocess.Popen[str]:
    """A process that made the folder and uses it."""
    user = subprocess.Popen([sys.executable, "-c", USER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None and user.stdout.readline() == "\n"
    return user


def end(user: subprocess.Popen[str]) -> None:
    user.send_signal(signal.SIGKILL)
    user.communicate()


def left_by_a_kill(folder: Path) -> Path:
    end(user_of(folder))
    (folder / "ring").write_bytes(b"\0")
    return folder


def test_a_folder_is_removed_at_the_end_also_after_an_error(temp: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch("x") as folder:
        (folder / "file").write_text("y")
        (folder / "inner").mkdir()
        assert folder.parent == temp and folder.name.startswith("kvtune-x-")
        raise ZeroDivisionError
    assert not list(temp.iterdir())


def test_a_folder_is_for_its_user_alone_whatever_the_umask(temp: Path) -> None:
    before = os.umask(0)
    try:
        with scratch("x", hidden=True) as folder:
            assert folder.name.startswith(HIDDEN)
            assert folder.stat().st_mode & 0o777 == 0o700
            assert (folder / MARK).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_the_mark_is_there_before_anything_else(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch("x") as folder:
        assert list(folder.iterdir()) == [folder / MARK]
        line, fields, end = (folder / MARK).read_text().split("\n")
        assert line == LINE and end == ""
        assert json.loads(fields) == {
            "folder": folder.name,
            "inode": folder.stat().st_ino,
            "pid": os.getpid(),
            "started": module.started_at(os.getpid()),
        }


def test_the_next_start_removes_the_folder_of_a_killed_process_and_keeps_a_running_ones(temp: Path) -> None:
    killed, running = temp / "kvtune-x-1", temp / "kvtune-x-2"
    users = [user_of(killed), user_of(running)]
    try:
        end(users[0])
        assert killed.is_dir() and running.is_dir()
        with scratch("y"):
            assert not killed.exists() and running.is_dir()
    finally:
        end(users[1])


def unmarked(folder: Path) -> None:
    (folder / MARK).unlink()


def with_a_lock_file(folder: Path) -> None:
    (folder / MARK).rename(folder / ".lock")


def marked_by_another_line(folder: Path) -> None:
    text = (folder / MARK).read_text()
    (folder / MARK).write_text(text.replace(LINE, f"{LINE}."))


def with_half_a_mark(folder: Path) -> None:
    (folder / MARK).write_text(f"{LINE}\n")


def marked_by_a_link(folder: Path) -> None:
    shutil.move(folder / MARK, folder.parent / "mark")
    (folder / MARK).symlink_to(folder.parent / "mark")


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("kvtune-my-results"))


def copied(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    (folder.parent / "copy").rename(folder)


def of_a_maker_that_lives(folder: Path) -> None:
    fields = json.loads((folder / MARK).read_text().split("\n")[1])
    fields |= {"pid": os.getpid(), "started": module.started_at(os.getpid())}
    (folder / MARK).write_text(f"{LINE}\n{json.dumps(fields)}\n")


@pytest.mark.parametrize(
    "change",
    [
        unmarked,
        with_a_lock_file,
        marked_by_another_line,
        with_half_a_mark,
        marked_by_a_link,
        moved,
        copied,
        of_a_maker_that_lives,
    ],
)
def test_a_folder_whose_mark_does_not_fit_stays(temp: Path, change: Callable[[Path], None]) -> None:
    """However old it is, whatever its name."""
    folder = left_by_a_kill(temp / "kvtune-sim-1")
    change(folder)
    for path in temp.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    before = sorted(temp.rglob("*"))
    assert sweep(temp) == []
    assert sorted(temp.rglob("*")) == before


def test_a_pid_that_is_used_again_keeps_no_folder(temp: Path) -> None:
    folder = left_by_a_kill(temp / "kvtune-sim-1")
    fields = json.loads((folder / MARK).read_text().split("\n")[1]) | {"pid": os.getpid()}
    (folder / MARK).write_text(f"{LINE}\n{json.dumps(fields)}\n")
    assert sweep(temp) == [folder]


def test_links_files_and_folders_of_other_users_stay(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = left_by_a_kill(temp / "elsewhere")
    (temp / "kvtune-link").symlink_to(elsewhere)
    (temp / "kvtune-file").write_text("")
    os.mkfifo(temp / "kvtune-fifo")
    foreign = left_by_a_kill(temp / "kvtune-foreign")
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert sweep(temp) == []
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    assert sweep(temp) == [foreign]
    assert elsewhere.is_dir() and (temp / "kvtune-file").exists()


def test_what_links_in_a_folder_point_at_stays(temp: Path) -> None:
    kept = temp / "kept"
    kept.mkdir()
    (kept / "data").write_text("mine")
    folder = left_by_a_kill(temp / "kvtune-sim-1")
    (folder / "folder").symlink_to(kept)
    (folder / "file").symlink_to(kept / "data")
    assert sweep(temp) == [folder]
    assert (kept / "data").read_text() == "mine"


def test_a_removal_that_is_killed_half_way_is_taken_up_again(
    temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark goes last."""
    folder = left_by_a_kill(temp / "kvtune-sim-1")
    (folder / "inner").mkdir()

    def killed(path: Path, ignore_errors: bool = False) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep(temp)
    monkeypatch.undo()
    assert (folder / MARK).exists()
    assert sweep(temp) == [folder]


def test_a_shared_folder_stays_until_its_last_process_leaves(temp: Path) -> None:
    folder = temp / "metrics"
    first, second = share(folder), share(folder)
    leave(folder, first)
    assert folder.is_dir()
    leave(folder, second)
    assert not folder.exists()


def test_a_folder_that_kvtune_did_not_make_is_not_shared(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MARKING_S", 0.0)
    (temp / "metrics").mkdir()
    (temp / "metrics" / "data").write_text("mine")
    (temp / "link").symlink_to(temp / "metrics")
    for name in ("metrics", "link"):
        with pytest.raises(FileExistsError, match="kvtune did not make it"):
            share(temp / name)
    assert (temp / "metrics" / "data").read_text() == "mine"


def test_a_process_that_shares_a_folder_waits_for_its_mark(
    temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sleep = temp / "metrics", time.sleep

    def marked_meanwhile(seconds: float) -> None:
        folder.rmdir()
        os.close(make(folder))

    folder.mkdir()
    monkeypatch.setattr(time, "sleep", marked_meanwhile)
    lock = share(folder)
    monkeypatch.setattr(time, "sleep", sleep)
    leave(folder, lock)
    assert not folder.exists()


def test_ctrl_c_while_a_folder_is_made_leaves_none(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the mark is there, and nobody knows it yet."""
    opened = os.open

    def pressed(path: Path, flags: int, mode: int = 0o777) -> int:
        os.close(opened(path, flags, mode))
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "open", pressed)
    with pytest.raises(KeyboardInterrupt), scratch("x"):
        pass
    monkeypatch.undo()
    assert not list(temp.iterdir())


@pytest.mark.parametrize("call", ["mkdir", "open", "write"])
def test_a_temp_folder_that_cannot_be_used_is_named_and_nothing_is_left(
    temp: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, call, full)
    with pytest.raises(KvtuneError, match="No space left") as raised, scratch("x"):
        pass
    monkeypatch.undo()
    assert "TMPDIR" in raised.value.hint
    assert not list(temp.iterdir())


def test_a_folder_that_cannot_be_read_is_no_error(temp: Path) -> None:
    assert sweep(temp / "missing") == []


def test_concurrent_makers_and_sweepers_lose_no_folder(temp: Path) -> None:
    """A mark is locked from the moment it is visible."""

    def work(number: int) -> bool:
        for n in range(20):
            folder = temp / f"kvtune-{number}-{n}"
            lock = make(folder)
            sweep(temp)
            if not (folder / MARK).exists():
                return False
            leave(folder, lock)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert not list(temp.glob("kvtune-*"))


def test_holding_a_folder_that_was_swept_says_that_it_is_gone(temp: Path) -> None:
    folder = left_by_a_kill(temp / "kvtune-serve-2")
    assert sweep(temp) == [folder]
    with pytest.raises(FileNotFoundError):
        hold(folder)


ALLOWED = {
    "base/scratch.py": {"rmtree", "rmdir", "unlink"},
    "base/files.py": {"unlink"},
    "cli/record.py": {"unlink"},
    "answers/diff/environments.py": {"rmtree"},
    "lab/engine/launch.py": {"unlink"},
    "lab/engine/profile.py": {"TemporaryFile"},
    "plugin/probe/ring.py": {"unlink"},
    "data/run/folder.py": {"rmdir", "unlink"},
    "lab/sim/simulators.py": {"unlink"},
    "lab/sim/saved.py": {"unlink"},
    "base/dialogue.py": {"TemporaryFile"},
    "answers/tune/recipes/shelf.py": {"unlink"},
}
"""Every folder is made by `scratch`, except environments in the user's cache (`environments`) and empty folders.
Removed files: what a recording kept in case of a kill (record), journals that were read first (experiment), saved
replays that have no space (saved), shared
memory of this run (launch), what a run file proves to belong to it (folder), the first of two files that this call
made (shelf), the rest in folders of `scratch`.
"""
REMOVING = {"mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile", "TemporaryFile", "mktemp"}
REMOVING |= {"rmtree", "rmdir", "removedirs", "unlink", "remove_tree"}


def called(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
            if node.attr == "remove" and isinstance(node.value, ast.Name) and node.value.id == "os":
                names.add("unlink")
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile"):
            names |= {alias.name for alias in node.names}
    return names & REMOVING


@pytest.mark.lint
def test_only_scratch_makes_and_removes_folders() -> None:
    found = {str(path.relative_to(PACKAGE)): called(path) for path in PACKAGE.rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == ALLOWED
