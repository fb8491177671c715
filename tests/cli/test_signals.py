"""Ctrl-C, SIGTERM and a closed terminal end every command alike: one line, exit code 130, nothing left behind."""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import typer

from kvtune.base.dialogue import Frames, Refused
from kvtune.base.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.base.scratch import scratch
from kvtune.cli import app as app_module
from kvtune.lab.setup.setup import Load, Setup
from kvtune.lab.sim import worker
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.worker import ReplayJob, Server
from kvtune.plugin.probe import lifetime
from kvtune.requests.loads.spec import build
from tests.living import living

STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

EARLY = """
import os, signal, sys, types
app = types.ModuleType("kvtune.cli.app")
def main():
    os.kill(os.getpid(), int(sys.argv[1]))
    signal.pause()
app.main = main
sys.modules["kvtune.cli.app"] = app
from kvtune.cli.start import main
from tests.simulator import on
main()
"""


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_before_the_command_begins_is_one_line_without_a_traceback(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(int(number))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "kvtune: interrupted\n")


def app_of(act: Callable[[], None]) -> Callable[[Sequence[str]], typer.Typer]:
    def made(arguments: Sequence[str]) -> typer.Typer:
        app = typer.Typer()

        @app.callback()
        def root() -> None: ...

        @app.command()
        def wait() -> None:
            act()

        return app

    return made


@pytest.mark.parametrize(("number", "said"), list(zip(STOPS, ("", " by SIGTERM", " by SIGHUP"), strict=True)))
def test_a_signal_in_any_command_is_one_line_and_leaves_no_folder(
    number: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def act() -> None:
        with scratch("x"):
            os.kill(os.getpid(), number)
            time.sleep(60)

    monkeypatch.setattr(app_module, "app_for", app_of(act))
    before = [signal.getsignal(n) for n in STOPS]
    assert app_module.run(["wait"]) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == f"kvtune: interrupted{said}\n"
    assert not list(tmp_path.iterdir())
    assert [signal.getsignal(n) for n in STOPS] == before


def test_a_signal_that_the_caller_ignores_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(app_module, "app_for", app_of(lambda: os.kill(os.getpid(), signal.SIGHUP)))
        assert app_module.run(["wait"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_takes_no_line_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(line: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(app_module.notices, "always", closed)
    monkeypatch.setattr(app_module, "app_for", app_of(lambda: os.kill(os.getpid(), signal.SIGHUP)))
    assert app_module.run(["wait"]) == EXIT_INTERRUPTED


def test_ctrl_c_before_a_replay_begins_does_not_wait_for_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = select.select

    def pressed(*args: list[int]) -> None:
        monkeypatch.setattr(select, "select", real)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Simulators(1) as simulators:
        assert simulators._worker is not None
        process = simulators._worker.child
        monkeypatch.setattr(select, "select", pressed)
        list(simulators.run([Setup(model="tiny-opt").with_load(build("decode:requests=1"))]))
    assert process.returncode == -signal.SIGKILL and not living([process.pid])
    assert not list(tmp_path.iterdir())


def test_a_replay_that_is_stopped_before_it_listens_is_interrupted_not_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "answer", lambda *_: time.sleep(60))
    receive, send = os.pipe()
    server = Server(send)
    job = ReplayJob(
        number=3,
        setup=Setup(model="tiny-opt", load=Load(spec="decode:requests=1")),
        out="",
    )
    server._start(job)
    server.stop()
    server._reap(block=True)
    os.close(send)
    with os.fdopen(receive, "rb") as reports:
        (report,) = Frames[Refused](Refused).feed(reports.read())
    assert (report.number, report.message) == (3, "interrupted")
    assert report.exit_code == EXIT_INTERRUPTED


def test_children_end_with_a_command_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "kvtune.answers.doctor.child"

    def asked(number: signal.Signals) -> None:
        raise KvtuneError(f"ends by {number.name}", "")

    monkeypatch.setattr(lifetime, "die_with_parent", asked)
    monkeypatch.setattr(sys, "argv", [module, "/nowhere"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(KvtuneError, match="ends by SIGKILL"):
        runpy.run_module(module, run_name="__main__")
