"""Files that are written whole or not at all: a temporary file beside the target, then a rename. Any process."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvtune.errors import KvtuneError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The temporary file to write to. It becomes `path` at the end of the block; an exception removes it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> IO[bytes]:
    """The file, open for reading. OSError where it is none: a pipe would wait for ever, a device never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")  # noqa: PTH123  (a descriptor has no path)
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextlib.contextmanager
def explained(path: Path, hint: str, what: str = "") -> Iterator[None]:
    """An OSError of the block as a KvtuneError: `cannot write WHAT PATH: REASON`, and the hint."""
    try:
        yield
    except OSError as error:
        target = f"{what} {path}" if what else str(path)
        raise KvtuneError(f"cannot write {target}: {error.strerror or error}", hint) from error
