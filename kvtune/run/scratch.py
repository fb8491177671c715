"""Temporary folders named kvtune-*, removed when no process uses them any more, also after a kill. Any process.

A process that uses a folder holds a shared lock on its `.lock` file; the kernel releases it when the process ends.
`sweep` runs whenever a new folder is made and removes unlocked ones.
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
from secrets import token_hex

from kvtune.errors import KvtuneError

PREFIX = "kvtune-"
LOCK = ".lock"
UNLOCKED_S = 60.0
"""A folder without a lock file may be in the making. If it is older than this, its maker was killed."""


@contextlib.contextmanager
def scratch(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder in the temp folder or `parent`; removed at the end, or by a later sweep if the process is killed."""
    parent = parent or Path(tempfile.gettempdir())
    try:
        sweep(parent, f"{PREFIX}*")
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
        lock = hold(folder)
    except OSError as error:
        raise KvtuneError(
            f"cannot make a folder in the temp folder: {error.strerror or error}",
            "free space there, or choose another: TMPDIR=/path kvtune ..",
        ) from error
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def hold(folder: Path) -> int:
    """Keep `folder` from being swept while the returned descriptor is open in any process.

    FileNotFoundError where the folder is gone. The lock file is locked before it gets its name: no sweep can take it.
    """
    while True:
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            part = folder / f"{LOCK}-{os.getpid()}-{token_hex(4)}"
            lock = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            with contextlib.suppress(FileExistsError):
                os.link(part, folder / LOCK)
            part.unlink(missing_ok=True)
        else:
            fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)  # another user's file came first, or a sweep had it: look again


def sweep(parent: Path, pattern: str) -> list[Path]:
    """Remove this user's matching folders under `parent` that no process holds. Never raises."""
    removed = []
    with contextlib.suppress(OSError):
        for folder in parent.glob(pattern):
            with contextlib.suppress(OSError), _abandoned(folder) as abandoned:
                if abandoned:
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
    return removed


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[bool]:
    """Whether nobody holds the folder; nobody can, while the context lasts."""
    about = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or about.st_uid != os.getuid():
        yield False
        return
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield time.time() - about.st_mtime > UNLOCKED_S
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)
