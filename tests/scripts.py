"""Scripts of `.ci` in a folder of their own, with stand-ins for what they call."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def ran(tree: Path, *command: str, **environment: str) -> tuple[int, list[str]]:
    """The exit code, and the lines of both outputs."""
    path = f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "TMPDIR": str(tree), **environment}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).splitlines()
