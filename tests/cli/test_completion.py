"""The Tab key: models, loads, keys, knobs, recipes and run files, in a real bash and as other shells ask."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtune.cli import completion
from kvtune.cli.profile import ProfileQuery
from kvtune.cli.query import declared
from tests.cli.terminal import KVTUNE, Terminal, bare, on_a_terminal

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A bash that has evaluated `kvtune --show-completion`, in a folder with two run files."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    folder = tmp_path_factory.mktemp("completion")
    for name in ("real", "rounds"):
        (folder / "reports").mkdir(exist_ok=True)
        shutil.copy(GOLDEN / f"schema1-{name}.kvrun", folder / "reports" / f"{name}.kvrun")
    program = folder / "bin" / "kvtune"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvtune "$@"\n')
    program.chmod(0o755)
    environment = bare(TERM="dumb")
    environment["PATH"] = f"{program.parent}:{environment['PATH']}"
    command = ("bash", "--norc", "--noprofile", "-i")
    with on_a_terminal(command, columns=200, environment=environment, folder=folder) as terminal:
        terminal.type("bind 'set enable-bracketed-paste off'; bind 'set bell-style none'\r")
        terminal.type('eval "$(kvtune --show-completion)"; echo rea""dy\r')
        terminal.until("ready\n")
        yield terminal


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("profile tiny-gr", "profile tiny-granite "),
        ("profile tiny-opt -w seed-decode-s", "profile tiny-opt -w seed-decode-short"),
        ("profile tiny-opt -w rounds:prefixes=4,suf", "profile tiny-opt -w rounds:prefixes=4,suffix="),
        ("profile tiny-opt --set core.reuse_b", "profile tiny-opt --set core.reuse_bonus_s="),
        ("profile tiny-opt --set core.policy=two", "profile tiny-opt --set core.policy=two_class "),
        ("sweep tiny-opt --set max_num_b", "sweep tiny-opt --set max_num_batched_tokens="),
        ("profile tiny-opt --objective x --core st", "profile tiny-opt --objective x --core stock "),
        ("sweep tiny-opt --objective ttft,thr", "sweep tiny-opt --objective ttft,throughput "),
        ("recipe show tiny-gr", "recipe show tiny-granite-cpu "),
        ("explain reports/re", "explain reports/real.kvrun "),
        ("explain la", "explain last "),
        ("compare last reports/ro", "compare last reports/rounds.kvrun "),
    ],
)
def test_bash_completes(shell: Terminal, typed: str, completed: str) -> None:
    """Tab, then the whole line is printed by turning it into the argument of an `echo`."""
    shell.raw = b""
    shell.type(f"kvtune {typed}\t")
    shell.type("\x01echo '[\x05]'\r")  # to the line's begin, quote it, to its end, close the quote
    shell.until("]\n")
    assert f"\n[kvtune {completed}]\n" in shell.text


def offered(line: str, shell: str = "zsh", **variables: str) -> str:
    environment = bare(_KVTUNE_COMPLETE=f"complete_{shell}", _TYPER_COMPLETE_ARGS=line, **variables)
    done = subprocess.run(KVTUNE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout


def test_zsh_and_fish_get_one_line_of_help_with_each_value() -> None:
    assert "tokens of each prefix" in offered("kvtune profile tiny-opt -w rounds:pre")
    fish = offered("kvtune profile tiny-opt --set core.sl", "fish", _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert fish.startswith("core.slack=\tlet a prompt resume")


def test_a_key_that_is_given_is_not_offered_again() -> None:
    names = [value for value, _ in completion.workloads("rounds:prefixes=4,")]
    assert "rounds:prefixes=4,prefix=" in names
    assert not any(name.startswith("rounds:prefixes=4,prefixes=") for name in names)


def test_what_is_offered_is_what_the_options_take() -> None:
    fields = declared(ProfileQuery)
    for name, taken in (("core", ("kvtune", "stock")), ("on", ("engine", "host", "sim"))):
        assert fields[name].words == taken
        assert all(f'"{word}"' in offered(f"kvtune profile tiny-opt --{name} ") for word in taken)


def test_nothing_is_printed_beside_the_answers_where_last_is_typed(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "schema1-real.kvrun", tmp_path)
    assert "real" in offered(f"kvtune compare last {tmp_path}/", KVTUNE_OUTPUT=str(tmp_path))
