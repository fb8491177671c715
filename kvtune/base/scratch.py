"""Temporary folders of kvtune, removed when no process uses them any more, also after a kill. Any process.

Each folder gets a mark file first: a fixed line, the folder's name and inode, and its maker's pid and start time. A
process that uses the folder holds a shared lock on the mark; the kernel releases the lock when the process ends.
`sweep`, which runs before a folder is made, removes only folders with a valid mark whose maker has ended and that no
process holds. A mark that was copied, or whose folder was renamed, is not valid.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

from kvtune.base.bounded import decode_json
from kvtune.base.errors import KvtuneError

PREFIX = "kvtune-"
HIDDEN = f".{PREFIX}"
MARK = ".kvtune-scratch"
LINE = "kvtune made this folder, and removes it with everything in it when the command that uses it has ended"
MARKING_S = 1.0
"""The longest time between making a folder and its mark, on a busy machine."""


@contextlib.contextmanager
def scratch(kind: str, parent: Path | None = None, *, hidden: bool = False) -> Iterator[Path]:
    """Make a private folder in `parent` or the temp folder; remove it at the end (after a kill: in a later sweep)."""
    place = parent or Path(tempfile.gettempdir())
    name = f"{HIDDEN if hidden else PREFIX}{kind}-{token_hex(4)}"
    with contextlib.ExitStack() as stack:
        try:
            sweep(place)
            folder = stack.enter_context(made(place / name))
        except OSError as error:
            another = "with -o DIR" if parent is not None else "by TMPDIR=/path kvtune .."
            raise KvtuneError(
                f"cannot make a folder in {place}: {error.strerror or error}",
                f"free space there, or choose another folder {another}",
            ) from error
        yield folder


@contextlib.contextmanager
def made(folder: Path) -> Iterator[Path]:
    """Make a folder of exactly this name, and remove it at the end. FileExistsError if the name is taken."""
    lock = make(folder)
    try:
        yield folder
    finally:
        _remove(folder, lock)
        os.close(lock)


def make(folder: Path) -> int:
    """Make and mark a folder, held until the returned descriptor is closed. FileExistsError if the name is taken."""
    folder.mkdir(mode=0o700)
    lock = None
    try:
        lock = os.open(folder / MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)  # before the mark has content, so that no sweep removes the folder
        maker = os.getpid()
        fields = {**_identity(folder), "pid": maker, "started": started_at(maker)}
        os.write(lock, f"{LINE}\n{json.dumps(fields)}\n".encode())
    except BaseException:  # also after Ctrl-C
        if lock is not None:
            os.close(lock)
        with contextlib.suppress(OSError):
            (folder / MARK).unlink(missing_ok=True)
            folder.rmdir()
        raise
    return lock


def hold(folder: Path) -> int:
    """Hold a marked folder until the returned descriptor is closed. FileNotFoundError if it is gone or not kvtune's."""
    lock = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    if _fields(folder, lock) is None:
        os.close(lock)
        raise FileNotFoundError(f"{folder} is not a folder that kvtune made")
    return lock


def share(folder: Path) -> int:
    """Make the folder, or hold it if another process made it first. FileExistsError if kvtune did not make it."""
    late = time.monotonic() + MARKING_S
    while True:
        with contextlib.suppress(FileExistsError):
            return make(folder)
        with contextlib.suppress(OSError):
            return hold(folder)
        if time.monotonic() > late:
            raise FileExistsError(f"{folder} exists, and kvtune did not make it")
        time.sleep(MARKING_S / 100)


def leave(folder: Path, lock: int) -> None:
    """Release a shared folder; remove it if no other process uses it."""
    os.close(lock)
    with contextlib.suppress(OSError):
        _take(folder, while_maker_lives=True)


def sweep(parent: Path) -> list[Path]:
    """Remove the folders in `parent` that killed processes of this user left. Does not raise OSError."""
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.startswith((PREFIX, HIDDEN)):
                with contextlib.suppress(OSError):
                    removed += [folder] if _take(folder) else []
    return removed


def _take(folder: Path, *, while_maker_lives: bool = False) -> bool:
    """Remove a folder that kvtune made and no process holds. Return whether it was such a folder."""
    lock = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fields = _fields(folder, lock)
        if fields is None or (not while_maker_lives and started_at(fields["pid"]) == fields["started"]):
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # last: no other process gets the lock meanwhile
        _remove(folder, lock)
        return True
    finally:
        os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    """Remove the folder and its contents, the mark last, so that a later sweep can complete an interrupted removal."""
    with contextlib.suppress(OSError):
        if _fields(folder, lock) is None:
            return
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != MARK:
                    path.unlink()
        if [path.name for path in folder.iterdir()] == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()


def _fields(folder: Path, descriptor: int) -> dict[str, int | str] | None:
    """Return the fields of an open mark, or None if kvtune did not write it for this user into this folder."""
    file, place = os.fstat(descriptor), folder.lstat()
    if not (stat.S_ISREG(file.st_mode) and stat.S_ISDIR(place.st_mode) and file.st_nlink):
        return None
    if not file.st_uid == place.st_uid == os.getuid():
        return None
    line, _, rest = os.pread(descriptor, 1 << 14, 0).decode(errors="replace").partition("\n")
    if line != LINE:
        return None
    try:
        fields: dict[str, int | str] = decode_json(rest)
    except ValueError:
        return None
    same = isinstance(fields, dict) and fields.keys() == {"folder", "inode", "pid", "started"}
    return fields if same and _identity(folder).items() <= fields.items() else None


def _identity(folder: Path) -> dict[str, int | str]:
    return {"folder": folder.name, "inode": folder.lstat().st_ino}


def started_at(pid: int | str) -> str:
    """Return a process's start in ticks since boot, which tells reused pids apart; "" if the process has ended."""
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in (b"Z", b"X") else values[18].decode()
