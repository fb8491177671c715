"""The command line's frame: exit codes, the two lines of an error, help without vLLM, pages and help in step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from kvtune.base.errors import KvtuneError
from kvtune.cli import app as app_module
from kvtune.cli.app import build_app
from tests.simulator import run

ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/commands.md"))


def commands() -> list[str]:
    app = build_app()
    shown = [c for c in app.registered_commands if c.callback is not None and not c.hidden]
    names = [c.name or c.callback.__name__ for c in shown]
    return names + [g.name or "" for g in app.registered_groups]


@pytest.mark.parametrize("name", commands())
def test_every_command_has_help_and_stands_in_readme_or_commands(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage:" in out and len(out.splitlines()) > 4
    assert f"`kvtune {name}" in PAGES


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["profile"],
        ["profile", "tiny-opt", "--no-such-option"],
        ["profile", "tiny-opt", "extra"],
        ["profile", "tiny-opt", "--core", "fast"],
        ["profile", "tiny-opt", "--probe", "loud"],
        ["profile", "tiny-opt", "--set", "core.nonsense=1"],
        ["profile", "tiny-opt", "--set", "slack=1"],
        ["profile", "tiny-opt", "--set", "core.slack=many"],
        ["profile", "tiny-opt", "--repeat", "0"],
        ["profile", "tiny-opt", "-w", "nonsense"],
        ["profile", "tiny-opt", "-w", "rounds:nonsense=1"],
        ["profile", "tiny-opt", "-w", "trace:path=/no/such/file"],
        ["profile", "/no/such/model"],
        ["profile", "tiny-opt", "--recipe", "/no/such/recipe.toml"],
    ],
)
def test_bad_input_is_two_lines_and_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    what, next_ = captured.err.splitlines()
    assert what.startswith("kvtune: ") and next_.startswith("  next: ")
    assert "Traceback" not in captured.err


def test_what_stands_after_the_dashes_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fake(arguments: Sequence[str]) -> typer.Typer:
        app = typer.Typer()

        @app.callback()
        def root() -> None: ...

        @app.command()
        def show(ctx: typer.Context) -> None:
            seen.append(ctx.find_root().obj)

        return app

    monkeypatch.setattr(app_module, "app_for", fake)
    assert run(["show", "--", "--block-size", "32", "--", "--debug"]) == 0
    assert seen == [["--block-size", "32", "--", "--debug"]]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KvtuneError("the cache is gone", "fetch it"), 1, "kvtune: the cache is gone"),
        (KvtuneError("stopped", "", 130), 130, "kvtune: stopped"),
        (KeyboardInterrupt(), 130, "kvtune: interrupted"),
        (ZeroDivisionError("by zero"), 1, "kvtune: unexpected ZeroDivisionError: by zero"),
    ],
)
def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def broken(arguments: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(app_module, "app_for", broken)
    assert run(["anything"]) == code
    assert capsys.readouterr().err.splitlines()[0] == line


def test_debug_lets_the_traceback_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: Sequence[str]) -> None:
        raise KvtuneError("the cache is gone")

    monkeypatch.setattr(app_module, "app_for", broken)
    with pytest.raises(KvtuneError):
        run(["anything", "--debug"])


NO_ENGINE = """
import sys
from collections.abc import Sequence
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "torch", "transformers", "altair", "optuna"):
            raise AssertionError(f"{name} was imported for help")
sys.meta_path.insert(0, Refuse())
from tests.simulator import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["profile", "--help"], []])
def test_help_needs_no_engine(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_ENGINE, *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
