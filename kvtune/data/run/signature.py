"""The line that marks files which kvtune wrote for a run or study: `kvtune VERSION, run ID`. Any process.

Each page, export, log, recipe and result has this line near its beginning.
"""

from __future__ import annotations

import os
import re
import stat
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvtune import __version__
from kvtune.base.errors import UsageError
from kvtune.base.files import creating, explained, replacing, unwritable
from kvtune.data.run.types import Header, RunLabel

HEAD_BYTES = 1 << 13


def signature(owner: str) -> str:
    return f"kvtune {__version__}, {owner}"


def identity(kind: str, *facts: object) -> str:
    """Return `KIND ID`, where ID is a hash of the facts."""
    return f"{kind} {blake2b(msgspec.json.encode(facts), digest_size=8).hexdigest()}"


def run_identity(run: Header | RunLabel) -> str:
    """Return the identity of a run. It does not change when results are added to the run file."""
    return identity("run", run.started_at, run.model, run.workload.hash, run.core, run.wall_s)


def wrote(path: Path, owner: str) -> bool:
    """Whether kvtune wrote the file for this run or study. False for a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        head = os.read(descriptor, HEAD_BYTES)
    finally:
        os.close(descriptor)
    return re.search(rf"\bkvtune [\w.+-]+, {re.escape(owner)}\b".encode(), head) is not None


def refuse_foreign(path: Path, owner: str, *, force: bool = False) -> None:
    """Raise UsageError if the path exists and kvtune did not write it for this run or study, unless `force`."""
    if why := unwritable(path):
        raise UsageError(f"cannot write {path}: {why}", "give another name, or move it away")
    if not force and os.path.lexists(path) and not wrote(path, owner):
        raise UsageError(
            f"{path} exists, and kvtune did not write it for this {owner.split()[0]}",
            "give another name, move it away, or add --force to overwrite it",
        )


def write_own(
    data: bytes, path: Path, owner: str, *, force: bool = False, hint: str = "", private: bool = False
) -> Path:
    """Write the file, whole or not at all. Replace only a file that kvtune wrote for this run or study.

    `private`: only this user can read it.
    """
    refuse_foreign(path, owner, force=force)
    put = replacing if os.path.lexists(path) else creating
    with (
        explained(path, hint or "free space or choose another place with -o"),
        put(path, private=private) as part,
    ):
        part.write(data)
    return path
