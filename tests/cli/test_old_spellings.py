"""Old spellings of `kvtune explain` work in this version, with one line on stderr that names the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.cli.app import build_app
from kvtune.cli.old import is_address
from tests.simulator import run as kvtune

LOG = '{"prompt": "Hello there", "answer": "x", "t0": 1.0, "t1": 2.0}\n'


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_text(LOG)
    return "requests:path=log.jsonl"


@pytest.mark.parametrize("how", ["-w {}", "-w{}", "--workload {}", "--workload={}"])
def test_a_log_in_the_old_spelling_is_explained_as_in_the_new_one(
    how: str, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtune(["explain-log", "log.jsonl", "--text-only", "--json"]) == 0
    new = capsys.readouterr()
    assert kvtune(["explain", "--text-only", *how.format(log).split(), "--json"]) == 0
    old = capsys.readouterr()
    assert old.out == new.out and new.err == ""
    assert old.err == (
        "`kvtune explain -w requests:path=LOG` goes with kvtune 0.2: use kvtune explain-log log.jsonl\n"
    )


def test_its_condition_decides_the_exit_code(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvtune(["explain", "-w", log, "--text-only", "--fail-on", "hit >= 0"]) == 1
    assert "failed: hit >= 0" in capsys.readouterr().err


def test_quiet_leaves_the_line_out(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvtune(["-q", "explain", "-w", log, "--text-only"]) == 0
    assert capsys.readouterr().err == ""


def test_a_servers_address_is_recorded_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Its answer: tests/watch/test_server.py. Here no server answers."""
    assert kvtune(["explain", "--header", "A: http://x", "127.0.0.1:9", "--seconds", "1"]) != 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        "`kvtune explain URL` goes with kvtune 0.2: use kvtune record 127.0.0.1:9 -o RUN"
    )
    assert "no server answers" in said[-2]


def test_a_run_files_name_is_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a:80").write_text("")
    assert is_address("host:8000") and is_address("http://host") and is_address("[::1]:80")
    assert not any(is_address(text) for text in ("a:80", "last", "last~1", "a.kvrun", "runs/a:80", ":80"))


def test_no_list_of_commands_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvtune(["--help"]) == 0
    assert "explain-url" not in capsys.readouterr().out
    assert build_app() is not None
