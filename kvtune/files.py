"""Files that are written whole or not at all: a temporary file beside the target, then a rename. Any process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def explained(path: Path, hint: str, what: str = "") -> Iterator[None]:
    """An OSError of the block as a KvtuneError: `cannot write WHAT PATH: REASON`, and the hint."""
    try:
        yield
    except OSError as error:
        target = f"{what} {path}" if what else str(path)
        raise KvtuneError(f"cannot write {target}: {error.strerror or error}", hint) from error
