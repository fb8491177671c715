"""A pseudo-terminal of 80 columns for tests, with a real kvtune process, or a shell, on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

KVTUNE = (sys.executable, "-m", "kvtune")
ROOT = Path(__file__).parents[2]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\x07\x0f]")


def bare(**variables: str) -> dict[str, str]:
    """An environment without what a person's shell may have set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **variables}


@dataclass
class Terminal:
    """What a process shows on a terminal, and what is typed into it."""

    descriptor: int
    process: subprocess.Popen[bytes]
    raw: bytes = b""

    @property
    def text(self) -> str:
        """All that was shown, without colours and cursor movements."""
        return ESCAPES.sub("", self.raw.decode(errors="replace")).replace("\r\n", "\n")

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def until(self, shown: str, seconds: float = 120.0) -> str:
        """Wait until this text was shown. AssertionError with all that was shown if it never is."""
        end = monotonic() + seconds
        while shown not in self.text and self._read(end - monotonic()):
            pass
        assert shown in self.text, self.text
        return self.text

    def rest(self, seconds: float = 240.0) -> tuple[int, str]:
        """The exit code, and all that was shown until the end."""
        end = monotonic() + seconds
        while self._read(end - monotonic()):
            pass
        return self.process.wait(5), self.text

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.descriptor], [], [], max(0.0, seconds))
        try:
            chunk = os.read(self.descriptor, 65536) if ready else b""
        except OSError:  # the other end is closed
            return False
        self.raw += chunk
        return bool(chunk)


@contextmanager
def on_a_terminal(
    command: Sequence[str],
    *,
    columns: int = 80,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[Terminal]:
    """Start a command on a terminal of its own; killed at the end of the block if it still runs."""
    leader, follower = pty.openpty()
    try:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = subprocess.Popen(
            list(command),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=environment if environment is not None else bare(),
            cwd=folder,
            start_new_session=True,
        )
    finally:
        os.close(follower)
    try:
        yield Terminal(leader, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(leader)


def shown(
    *arguments: str, columns: int = 80, environment: dict[str, str] | None = None, folder: Path | None = None
) -> tuple[int, str]:
    """Exit code and text of a kvtune command line on a terminal."""
    with on_a_terminal(
        (*KVTUNE, *arguments), columns=columns, environment=environment, folder=folder
    ) as terminal:
        return terminal.rest()
