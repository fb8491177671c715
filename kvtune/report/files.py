"""Writing what people asked for: whole or not at all, and never over something without being told."""

from __future__ import annotations

from pathlib import Path

from kvtune.errors import UsageError
from kvtune.files import explained, replacing


def write_new(text: str, path: Path, *, force: bool = False) -> Path:
    """Write `text` to `path`: a new file, or with `force` any. Folders on the way are made."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "give a file name with -o FILE")
    if path.exists() and not force:
        raise UsageError(f"{path} exists", "give another name with -o FILE, or --force to overwrite it")
    with explained(path, "free space or choose another place with -o FILE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    return path
