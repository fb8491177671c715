"""Writes files whole or not at all: a temporary file in the same folder, then a rename. Any process."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import IO

from kvtune.errors import KvtuneError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file to write to. At the end of the block it replaces `path`, with the old file's permissions.

    After an exception the new file is removed. A link at `path` is replaced, not followed.
    """
    with _part(path, _mode(path)) as (part, file):
        yield file
        file.close()
        part.replace(path)


@contextlib.contextmanager
def creating(path: Path) -> Iterator[IO[bytes]]:
    """Do the same as `replacing`, but raise FileExistsError if `path` exists when the block ends, even as a link."""
    with _part(path, None) as (part, file):
        yield file
        file.close()
        try:
            os.link(part, path)
            part.unlink()
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: create `path` empty, then replace it
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            part.replace(path)


@contextlib.contextmanager
def _part(path: Path, mode: int | None) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yield a new file in the folder of `path` and remove it after an exception.

    Its name is random and it is written through its descriptor, so that nobody can make kvtune write to another file.
    """
    part = path.with_name(f".kvtune-{token_hex(8)}.part")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            yield part, file
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


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
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def _mode(path: Path) -> int | None:
    """Return the permissions of a regular file, or None if `path` is a link, a folder or missing."""
    return path.stat().st_mode & 0o777 if path.is_file() and not path.is_symlink() else None


@contextlib.contextmanager
def explained(path: Path, hint: str, what: str = "") -> Iterator[None]:
    """Turn an OSError of the block into a KvtuneError: `cannot write WHAT PATH: REASON`, with the hint."""
    try:
        yield
    except OSError as error:
        target = f"{what} {path}" if what else str(path)
        raise KvtuneError(f"cannot write {target}: {error.strerror or error}", hint) from error
