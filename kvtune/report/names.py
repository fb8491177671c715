"""A run's processes, command, files and times in words."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path

from kvtune.analysis.processes import process_keys, process_title
from kvtune.run.types import Run


def process_name(run: Run, index: int) -> str:
    """The title of a process, by its number in a table."""
    keys = process_keys(run)
    return process_title(keys[index]) if 0 <= index < len(keys) else f"process {index}"


def command_text(run: Run) -> str:
    """The command line to repeat the run: the program by its name, without the folder it was installed in."""
    words = run.header.command
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""


def source_line(file: str, line: int) -> str:
    """A file's path from its package on, without the folder it was installed in."""
    if not file:
        return "–"
    for root in ("/site-packages/", "/dist-packages/", "/lib/python3"):
        _, matched, tail = file.rpartition(root)
        if matched:
            file = tail.split("/", 1)[-1] if root == "/lib/python3" else tail
            break
    else:
        _, matched, tail = file.rpartition("/kvtune/")
        file = f"kvtune/{tail}" if matched else file
    return f"{file}:{line}" if line else file


def when(started_at: str) -> str:
    """`21 November 2026, 10:53 UTC`; text that is not a time is returned unchanged."""
    try:
        moment = datetime.fromisoformat(started_at).astimezone(UTC)
    except ValueError:
        return started_at
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"
