"""docs/tutorial.md, run as it stands: its commands in their order, and what each prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.lab.engine.serving import free_port

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorial.md"
LINES = re.compile(r"^#\d+ ")

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1200)]


def blocks() -> list[list[str]]:
    found = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return [block.splitlines() for block in found]


def masked(line: str) -> str:
    """A line without the time that its request took, and without the blanks that fill a column."""
    return re.sub(r"  \d+\.\d s$", "", line.rstrip())


@contextmanager
def background(command: list[str], folder: Path, out: Path) -> Iterator[Callable[[], str]]:
    """A command that runs beside others; yields what it has printed so far."""
    with out.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=environment()
        )
        try:

            def printed() -> str:
                assert process.poll() is None, out.read_text()
                return out.read_text()

            yield printed
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "COLUMNS": "120"}


def until(happened: Callable[[], bool], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.2)


def answers(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
        return bool(reply.status == 200)
    return False


def test_the_tutorial_does_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    server, relay = free_port(), free_port()

    def words(line: str) -> list[str]:
        line = line.removeprefix("$ ").replace("localhost:8000", f"localhost:{server}")
        line = line.replace("localhost:8001", f"localhost:{relay}").replace(
            "docs/tutorial/", f"{ROOT}/docs/tutorial/"
        )
        return line.split()

    shown = blocks()
    commands = [block for block in shown if block[0].startswith("$ ")]
    model, serve, tap, ask, explain, mended = commands
    subprocess.run(words(model[0]), cwd=tmp_path, env=environment(), check=True)
    with background([*words(serve[0]), "--port", str(server)], tmp_path, tmp_path / "server.txt") as served:
        until(lambda: bool(served()) and answers(server))
        listening = [*words(tap[0]), "--listen", str(relay)]
        with background(listening, tmp_path, tmp_path / "tap.txt") as tapped:
            # It then knows that the server computed no prompt before: see docs/tap.md, "What is unknown".
            until(lambda: "relays to" in tapped() and "GET /metrics" in served())
            for requests, block in ((6, ask), (6, explain), (12, mended)):
                done = subprocess.run(
                    words(block[0]),
                    cwd=tmp_path,
                    env=environment(),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, done.stderr
                printed = [masked(line) for line in done.stdout.splitlines()]
                wanted = [masked(line) for line in block[1:] if line != "..."]
                assert [line for line in wanted if line not in printed] == []
                until(lambda count=requests: f"\n#{count} " in tapped() and tapped().endswith("\n"), 60)  # type: ignore[misc]
            lines = [masked(line) for line in tapped().splitlines()]
    for block in shown:
        if LINES.match(block[0]):
            first = lines.index(masked(block[0]))
            assert lines[first : first + len(block)] == [masked(line) for line in block]
