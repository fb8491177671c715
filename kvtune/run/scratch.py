"""Folders for work in progress: named kvtune-*, gone when their users are, also after a kill. Any process.

Whoever uses a folder holds a shared lock on `.lock` in it. The lock goes with the process, however it ends. `sweep`,
called whenever a new folder is made, removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "kvtune-"
LOCK = ".lock"
UNLOCKED_S = 60.0
"""A folder without a lock may be one that is being made; older than this, its maker was killed in between."""


@contextlib.contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A new folder in the temp folder; removed at the end, or swept later if the end never comes."""
    sweep(Path(tempfile.gettempdir()), f"{PREFIX}*")
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
    lock = hold(folder)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def hold(folder: Path) -> int:
    """Keep `folder` from being swept for as long as the returned descriptor is open, in any process."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def sweep(parent: Path, pattern: str) -> list[Path]:
    """Remove this user's folders under `parent` that match and that no process holds. Never raises."""
    removed = []
    with contextlib.suppress(OSError):
        for folder in parent.glob(pattern):
            with contextlib.suppress(OSError):
                if _abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
    return removed


def _abandoned(folder: Path) -> bool:
    about = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or about.st_uid != os.getuid():
        return False
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - about.st_mtime > UNLOCKED_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
