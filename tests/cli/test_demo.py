"""`kvtune demo`: its commands run on the shipped files, and what it prints is what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.requests.log.requests_log import read_log
from tests.simulator import run


def test_the_demo_shows_the_miss_the_text_the_mend_the_gain_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["demo"]) == 0
    said = capsys.readouterr().out
    commands = [line.removeprefix("$ kvtune ") for line in said.splitlines() if line.startswith("$ ")]
    assert [line.split()[0] for line in commands] == ["tap", "explain-log", "explain-log", "report"]
    assert said.count("a time of day or time stamp") >= 3 and "40.9 %" in said and "81.0 %" in said
    assert len(list(read_log(tmp_path / "kvtune-demo" / "mended.jsonl"))) == 8
    assert "73.9" in (tmp_path / "kvtune-demo" / "agent.html").read_text(encoding="utf-8")
    for line in commands[2:]:  # what it prints can be typed
        assert run([*line.split(), *(["--force"] if line.startswith("report") else [])]) == 0


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert run(["demo", str(tmp_path / "mine")]) == 2
    assert "exists" in capsys.readouterr().err and not list((tmp_path / "mine").iterdir())
