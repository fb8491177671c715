"""Every write of a file: whole or not at all, a temporary file in the same folder, then a rename. Any process.

Only new names and regular files are written to: no device, pipe, socket, folder or link. Journals and traces, whose
lines must survive a kill, are appended to (`appending`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from kvtune.base.bounded import decode_json
from kvtune.base.errors import KvtuneError, UsageError

KINDS = {
    stat.S_IFLNK: "a link, and kvtune writes through none",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
PART = re.compile(r"\.kvtune-[0-9a-f]{16}\.part")
CHUNK = 1 << 16
ABANDONED_S = 60.0
"""A temporary file that no process has locked is removed if it was last written before this many seconds."""


def unwritable(path: Path) -> str:
    """Say what stands at `path` and is never replaced: `it is a device`. "" for a regular file or nothing."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else f"it is {KINDS.get(stat.S_IFMT(mode), 'no regular file')}"


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Yield a new file to write to. At the end of the block it replaces `path`, with the old file's permissions.

    After an exception the new file is removed. OSError if anything else than a regular file stands at `path`.
    `private`: only this user can read it.
    """
    mode = _mode(path)
    with _part(path, mode if mode is None or not private else mode & 0o600, private) as (part, file):
        yield file
        file.close()
        moved(part, path)


@contextlib.contextmanager
def creating(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Do the same as `replacing`, but raise FileExistsError if `path` exists when the block ends, even as a link."""
    with _part(path, None, private) as (part, file):
        yield file
        file.close()
        try:
            os.link(part, path)
            part.unlink()
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: create `path` empty, then replace it
            claim(path)
            part.replace(path)


def moved(part: Path, path: Path) -> None:
    """Rename a complete file to `path`. OSError if anything else than a regular file stands there."""
    _mode(path)
    part.replace(path)


def claim(path: Path) -> None:
    """Create an empty file that only this user can read. FileExistsError if the name is taken."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def appending(path: Path, *, private: bool = False, buffering: int = -1) -> IO[bytes]:
    """Open a new or regular file to read it and to append to it. OSError for anything else, links included.

    `private`: only this user can read it, also if it was there before.
    """
    return os.fdopen(append_descriptor(path, private=private), "r+b", buffering=buffering)


def append_descriptor(path: Path, *, private: bool = False) -> int:
    """Do the same as `appending`, for a writer that keeps the file open until its process ends."""
    if why := unwritable(path):
        raise OSError(errno.EINVAL, why, str(path))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600 if private else 0o666)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if private and mode & 0o077:
            os.fchmod(descriptor, mode & 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def lines_descriptor(path: Path, start: bytes) -> int:
    """Open a private file of lines to append to: a new one, an empty one, or one that begins with `start`.

    FileExistsError for any other file, which stays as it is. An incomplete last line, which a crash left, is removed,
    unless another process writes to the file.
    """
    if os.path.lexists(path):
        with open_regular(path) as file:
            if not start.startswith(file.read(len(start))):
                raise FileExistsError(errno.EEXIST, "it holds something else", str(path))
    descriptor = append_descriptor(path, private=True)
    _drop_torn_line(descriptor)
    return descriptor


def write_lines(descriptor: int, lines: bytes | bytearray) -> int:
    """Append whole lines, and return how many bytes of whole lines the disk took. OSError if it takes none."""
    done = os.write(descriptor, lines) if lines else 0
    if done < len(lines):
        torn = len(lines[:done].rpartition(b"\n")[2])
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - torn)
        done -= torn
    return done


def _drop_torn_line(descriptor: int) -> None:
    """Cut off an incomplete last line, unless another process writes to the file. Share the file's lock from now on."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return
    end = place = os.fstat(descriptor).st_size
    while place:
        begin = max(0, place - CHUNK)
        line_end = os.pread(descriptor, place - begin, begin).rfind(b"\n")
        if line_end >= 0:
            place = begin + line_end + 1
            break
        place = begin
    if place < end:
        os.ftruncate(descriptor, place)
    fcntl.flock(descriptor, fcntl.LOCK_SH)


@contextlib.contextmanager
def _part(path: Path, mode: int | None, private: bool) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yield a new, locked file in the folder of `path` and remove it after an exception.

    Its name is random and it is written through its descriptor, so that nobody can make kvtune write to another file.
    """
    _sweep(path.parent)
    part = path.with_name(f".kvtune-{token_hex(8)}.part")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o600 if private or mode is not None else 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if mode is not None:
                os.fchmod(descriptor, mode)
            yield part, file
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _sweep(folder: Path) -> None:
    """Remove temporary files in the folder that killed processes of this user left."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if PART.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_abandoned(Path(entry))


def _remove_abandoned(part: Path) -> None:
    descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()
        if ours and about.st_mtime < time.time() - ABANDONED_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer holds it
            part.unlink()
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. OSError for any other kind: a pipe could block, a device never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")  # noqa: PTH123  (a descriptor has no path)
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """Read the whole file. OSError if it is not a regular file or has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size  # 0 of the kernel's own files
        if size > most:
            raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
        content = file.read(size + 1)  # all of it is allocated
        if len(content) > size:  # it was written to meanwhile
            content += file.read(most - size)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def read_json(path: Path, most: int) -> Any:
    """Read a JSON file as Python does: NaN and Infinity are numbers. OSError as `read_regular`, or ValueError."""
    decoded = decode_json(read_regular(path, most))
    json.dumps(
        decoded, ensure_ascii=False
    ).encode()  # a ValueError for half a character, which nothing could print
    return decoded


def _mode(path: Path) -> int | None:
    """Return the permissions of a regular file, None if `path` is missing. OSError for anything else."""
    if why := unwritable(path):
        raise OSError(errno.EINVAL, why, str(path))
    try:
        return path.lstat().st_mode & 0o777
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def explained(path: Path, hint: str, what: str = "") -> Iterator[None]:
    """Turn an OSError of the block into a KvtuneError: `cannot write WHAT PATH: REASON`, with the hint."""
    try:
        yield
    except OSError as error:
        target = f"{what} {path}" if what else str(path)
        raise KvtuneError(f"cannot write {target}: {error.strerror or error}", hint) from error


def real(path: Path) -> Path:
    """Follow all links. A link in a circle stays as it is: whoever opens it is told."""
    return Path(os.path.realpath(path))


def home_folder() -> Path | None:
    """Return the user's home folder; None for a user without one, as in a container that runs under a bare number."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cache_folder() -> Path | None:
    """Return the folder of what kvtune keeps for this user and can make again; None for a user without a home."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), home_folder()
    if not cache and home is None:
        return None
    return (Path(cache) if cache or home is None else home / ".cache") / "kvtune"


def write_new(text: str, path: Path, *, force: bool = False, private: bool = False) -> Path:
    """Write `text` to `path` and make missing folders. Raise UsageError if the file exists, unless `force`.

    `private`: only this user can read it.
    """
    if why := unwritable(path):
        raise UsageError(f"cannot write {path}: {why}", "give the name of a file with -o FILE")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists", "give another name with -o FILE, or --force to overwrite it")
    with explained(path, "free space or choose another place with -o FILE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with (replacing if force else creating)(path, private=private) as part:
            part.write(text.encode())
    return path
