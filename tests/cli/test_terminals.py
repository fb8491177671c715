"""What a poor terminal shows: 40 columns, no colours, no UTF-8. Real processes on a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "golden" / "schema1-real.kvrun"
COMMAND = [sys.executable, "-m", "kvtune", "report", str(RUN), "--console"]
FIGURES = ("24 requests", "62.7 %", "EngineCore")


def on_a_terminal(columns: int, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and what the terminal was sent."""
    leader, follower = pty.openpty()
    try:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = subprocess.Popen(COMMAND, stdout=follower, stderr=follower, env=environment)
    finally:
        os.close(follower)
    shown = bytearray()
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    return process.wait(), shown.decode(errors="replace")


def bare(**variables: str) -> dict[str, str]:
    kept = {n: os.environ[n] for n in ("PATH", "PYTHONPATH", "HOME") if n in os.environ}
    return {**kept, **variables}


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_forty_columns_are_enough_for_every_figure(term: str) -> None:
    code, text = on_a_terminal(40, bare(TERM=term, LC_ALL="C"))
    assert code == 0
    for figure in FIGURES:
        assert figure in text
    assert ("\x1b[" in text) is (term != "dumb")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_the_output_cannot_encode_is_a_question_mark(encoding: str) -> None:
    done = subprocess.run(COMMAND, capture_output=True, env=bare(PYTHONIOENCODING=encoding), check=False)
    text = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    for figure in FIGURES:
        assert figure in text
    assert ("µs" in text) is (encoding != "ascii")


def test_an_error_on_such_a_terminal_is_still_two_lines() -> None:
    command = [sys.executable, "-m", "kvtune", "report", "no–such–file.kvrun"]
    done = subprocess.run(command, capture_output=True, env=bare(PYTHONIOENCODING="ascii"), check=False)
    first, second = done.stderr.decode("ascii").strip().splitlines()
    assert done.returncode == 2 and first.startswith("kvtune: ") and second.startswith("  next: ")
