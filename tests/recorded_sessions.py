"""The recorded sessions of tests/recordings, unpacked, and sessions written by hand."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).parent / "recordings" / "weka.tar.gz"


def unpacked(folder: Path) -> Path:
    """Unpack the 31 sessions into a folder; return where their files are."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "weka"


def asked(t: float, tokens: int, ids: range | list[int], **fields: Any) -> dict[str, Any]:
    """Return a request of a session's file."""
    return {"t": t, "type": "n", "in": tokens, "out": 10, "hash_ids": list(ids), **fields}


def written(folder: Path, requests_: list[dict[str, Any]], name: str = "trace_1", **fields: Any) -> Path:
    """Write a session's file."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.json"
    whole = {"id": name, "block_size": 64, "hash_id_scope": "local", "tool_tokens": 64, "requests": requests_}
    file.write_text(json.dumps({**whole, **fields}))
    return file
