"""A copy of kvtune with a change in it, which shows how many places the change takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copied(folder: Path, *names: str) -> Path:
    """Copy kvtune, and what else is named, to a folder, and return the copy of the package."""
    for name in ("kvtune", *names):
        ignored = shutil.ignore_patterns("golden", "test_*", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder / "kvtune"


def after(path: Path, place: str, text: str) -> int:
    """Write text behind a place of a file that stands there once. Return its number of lines."""
    source = path.read_text(encoding="utf-8")
    assert source.count(place) == 1, (path, place)
    path.write_text(source.replace(place, place + text), encoding="utf-8")
    return text.count("\n")


def python(folder: Path, *words: str) -> str:
    """Run Python on the copy of kvtune in a folder."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
