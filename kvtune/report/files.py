"""Writes an output file completely or not at all, and over an existing file only with `force`."""

from __future__ import annotations

import os
from pathlib import Path

from kvtune.errors import UsageError
from kvtune.files import creating, explained, replacing, unwritable


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
