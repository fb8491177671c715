"""Temporary folders are removed when their processes end, however they end; other folders are never touched."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtune.errors import KvtuneError
from kvtune.run.scratch import LOCK, UNLOCKED_S, hold, scratch, sweep


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_at_the_end_also_after_an_error(temp: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch("x") as folder:
        (folder / "file").write_text("y")
        assert folder.parent == temp and folder.name.startswith("kvtune-x-")
        raise ZeroDivisionError
    assert not list(temp.iterdir())


USER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from kvtune.run.scratch import scratch
with scratch("x") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_next_start_removes_the_folder_of_a_killed_process_and_keeps_a_running_ones(temp: Path) -> None:
    users = [
        subprocess.Popen([sys.executable, "-c", USER, str(temp)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        folders = [Path(user.stdout.readline().strip()) for user in users if user.stdout]
        users[0].send_signal(signal.SIGKILL)
        users[0].wait()
        assert all(folder.is_dir() for folder in folders)
        with scratch("y"):
            assert not folders[0].exists() and folders[1].is_dir()
    finally:
        for user in users:
            user.kill()
            user.wait()
            assert user.stdout is not None
            user.stdout.close()


def test_a_folder_without_a_lock_file_is_removed_only_when_it_is_old(temp: Path) -> None:
    folder = temp / "kvtune-sim-abc"
    folder.mkdir()
    assert sweep(temp, "kvtune-*") == []
    old = folder.stat().st_mtime - 2 * UNLOCKED_S
    os.utime(folder, (old, old))
    assert sweep(temp, "kvtune-*") == [folder]


def test_links_files_and_folders_of_other_users_stay(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = temp / "elsewhere"
    elsewhere.mkdir()
    (temp / "kvtune-link").symlink_to(elsewhere)
    (temp / "kvtune-file").write_text("")
    foreign = temp / "kvtune-foreign"
    foreign.mkdir()
    os.close(hold(foreign))
    monkeypatch.setattr(os, "getuid", lambda: foreign.stat().st_uid + 1)
    assert sweep(temp, "kvtune-*") == []
    monkeypatch.undo()
    assert sweep(temp, "kvtune-f*") == [foreign]
    assert elsewhere.is_dir() and (temp / "kvtune-file").exists()


def test_a_folder_stays_until_its_last_process_ends(temp: Path) -> None:
    folder = temp / "kvtune-serve-1"
    folder.mkdir()
    first, second = hold(folder), hold(folder)
    os.close(first)
    assert sweep(temp, folder.name) == []
    os.close(second)
    assert (folder / LOCK).exists()
    assert sweep(temp, folder.name) == [folder]


def test_a_temp_folder_that_cannot_be_used_is_named(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(KvtuneError, match="No space left") as raised, scratch("x"):
        pass
    assert "TMPDIR" in raised.value.hint


def test_a_folder_that_cannot_be_read_is_no_error(temp: Path) -> None:
    assert sweep(temp / "missing", "kvtune-*") == []


def test_concurrent_makers_and_sweepers_lose_no_folder(temp: Path) -> None:
    """A lock file is locked from the moment it is visible."""

    def make(number: int) -> bool:
        for n in range(20):
            folder = temp / f"kvtune-{number}-{n}"
            folder.mkdir()
            lock = hold(folder)
            sweep(temp, "kvtune-*")
            if not (folder / LOCK).exists():
                return False
            os.close(lock)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(make, range(8)))
    sweep(temp, "kvtune-*")
    assert not list(temp.glob("kvtune-*"))


def test_holding_a_folder_that_is_being_swept_says_that_it_is_gone(temp: Path) -> None:
    folder = temp / "kvtune-serve-2"
    folder.mkdir()
    os.close(hold(folder))
    assert sweep(temp, folder.name) == [folder]
    with pytest.raises(FileNotFoundError):
        hold(folder)
