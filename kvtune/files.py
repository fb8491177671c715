"""Files that are written whole or not at all: a temporary file beside the target, then a rename. Any process."""

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
    """The file to write to. It becomes `path` at the end of the block, with the permissions of the file that it
    replaces; an exception removes it. A link at `path` is replaced, not followed.
    """
    with _part(path, _mode(path)) as (part, file):
        yield file
        file.close()
        part.replace(path)


@contextlib.contextmanager
def creating(path: Path) -> Iterator[IO[bytes]]:
    """Do as `replacing`, but raise FileExistsError if the name is taken at the end of the block, even by a link."""
    with _part(path, None) as (part, file):
        yield file
        file.close()
        try:
            os.link(part, path)
            part.unlink()
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: the name is taken first
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            part.replace(path)


@contextlib.contextmanager
def _part(path: Path, mode: int | None) -> Iterator[tuple[Path, IO[bytes]]]:
    """A new file beside `path`. Its name cannot be foreseen, and it is written through its descriptor: what somebody
    puts in its place is neither followed nor written.
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
    """The file, open for reading. OSError if it is not a regular file: a pipe could block, a device never ends."""
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
    """The permissions of an existing file; None for anything else."""
    return path.stat().st_mode & 0o777 if path.is_file() and not path.is_symlink() else None


@contextlib.contextmanager
def explained(path: Path, hint: str, what: str = "") -> Iterator[None]:
    """An OSError of the block as a KvtuneError: `cannot write WHAT PATH: REASON`, and the hint."""
    try:
        yield
    except OSError as error:
        target = f"{what} {path}" if what else str(path)
        raise KvtuneError(f"cannot write {target}: {error.strerror or error}", hint) from error
