"""Starts every child process: it runs and imports nothing because it lies in the current folder.

`python -m` puts the current folder before the standard library, where a stranger's `gc.py` would be imported in place
of Python's. PYTHONSAFEPATH=1 forbids that, also in processes that the child starts: EngineCore, workers, API servers.
Paths that are searched lose their relative entries: an empty entry or `.` is the current folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

SEARCHED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that list folders of programs, modules and libraries."""
SET = {"PYTHONSAFEPATH": "1"}
UNLESS_SET = {"NUMBA_CACHE_DIR": "", "NUMBA_CUDA_DRIVER": ""}
"""What numba would read from `.numba_config.yaml` in the current folder: pickled code and a library to load."""

Child = subprocess.Popen[bytes]
Stream = int | IO[bytes] | None


class Interpreter(NamedTuple):
    """An interpreter, and what its processes' environment has beside this one's."""

    path: str = sys.executable
    variables: Mapping[str, str] = {}

    def python(self, module: str, *words: str) -> list[str]:
        """Return the command that runs a module with this interpreter."""
        return [self.path, "-m", module, *words]


THIS = Interpreter()


def python(module: str, *words: str) -> list[str]:
    """Return the command that runs a module with the interpreter of this process."""
    return THIS.python(module, *words)


def start(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> Child:
    """Start a command, with `variables` added to this process's environment."""
    return subprocess.Popen(
        _by_path(command),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=start_new_session,
        env=safe({**os.environ, **(variables or {})}),
    )


def answer(
    command: Sequence[str],
    *,
    question: str | None = None,
    timeout_s: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output. `question`: its standard input; `variables` as for `start`."""
    return subprocess.run(
        _by_path(command),
        input=question,
        stdin=subprocess.DEVNULL if question is None else None,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=safe({**os.environ, **(variables or {})}),
    )


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command."""
    words = _by_path(command)
    os.execve(words[0], words, safe(environ))


def program(name: str) -> str | None:
    """Return the path of a program on PATH, never one of the current folder; None if there is none."""
    return shutil.which(name, path=_absolute(os.environ.get("PATH", os.defpath)))


def browse(address: str) -> bool:
    """Open an address in the user's browser, the one that BROWSER names if set. Return whether there is a browser."""
    import webbrowser

    guard()  # webbrowser searches PATH
    return webbrowser.open(address)


def guard() -> None:
    """Make this process's own environment safe: libraries that it imports start programs, too."""
    made = safe(os.environ)
    for name in os.environ.keys() - made.keys():
        del os.environ[name]
    os.environ.update(made)


def safe(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what makes a process search the current folder."""
    made = {**UNLESS_SET, **environ, **SET}
    for name in SEARCHED:
        kept = _absolute(made.pop(name, ""))
        if kept:
            made[name] = kept
    return made


def _absolute(folders: str) -> str:
    return os.pathsep.join(folder for folder in folders.split(os.pathsep) if Path(folder).is_absolute())


def _by_path(command: Sequence[str]) -> list[str]:
    if not Path(command[0]).is_absolute():
        raise ValueError(f"{command[0]} is no absolute path: look it up with `program`")
    return list(command)
