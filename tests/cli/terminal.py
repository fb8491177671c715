"""A pseudo-terminal of 80 columns: a command line of kvtune in this process, a real process, or a shell on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from tests.simulator import run

KVTUNE = (sys.executable, "-m", "kvtune")
ROOT = Path(__file__).parents[2]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\x07\x0f]")


def bare(**variables: str) -> dict[str, str]:
    """An environment without what a person's shell may have set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **variables}


def text_of(raw: bytes) -> str:
    """What was shown, without colours and cursor movements."""
    return ESCAPES.sub("", raw.decode(errors="replace")).replace("\r\n", "\n")


@dataclass
class Terminal:
    """What a process shows on a terminal, and what is typed into it."""

    descriptor: int
    process: subprocess.Popen[bytes]
    raw: bytes = b""

    @property
    def text(self) -> str:
        """All that was shown, without colours and cursor movements."""
        return text_of(self.raw)

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


def seen(
    *arguments: str, columns: int = 80, folder: Path | None = None, **variables: str
) -> tuple[int, bytes]:
    """Exit code and all bytes of a kvtune command line that runs in this process, on a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    raw = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(leader, 65536):
                raw.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            open(follower, "w", encoding="utf-8", buffering=1, closefd=False) as out,
            open(follower, encoding="utf-8", closefd=False) as typed,
        ):
            for name in ("NO_COLOR", "FORCE_COLOR", "KVTUNE_OUTPUT"):
                patch.delenv(name, raising=False)
            for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **variables}.items():
                patch.setenv(name, value)
            if folder is not None:
                patch.chdir(folder)
            for name, stream in (("stdin", typed), ("stdout", out), ("stderr", out)):
                patch.setattr(sys, name, stream)
            code = run(arguments)
    finally:
        os.close(follower)
        reader.join()
        os.close(leader)
    return code, bytes(raw)


def shown(
    *arguments: str, columns: int = 80, folder: Path | None = None, **variables: str
) -> tuple[int, str]:
    """Exit code and text of a kvtune command line on a terminal, without colours and cursor movements."""
    code, raw = seen(*arguments, columns=columns, folder=folder, **variables)
    return code, text_of(raw)
