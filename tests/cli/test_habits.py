"""Options of every day: --quiet, --open, the output folder from KVTUNE_OUTPUT."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from kvtune.cli.profile import ProfileQuery
from kvtune.data.run.output import output_folder
from kvtune.lab.setup.setup import Setup
from tests.simulator import run

GOLDEN = Path(__file__).parents[1] / "golden"
REPLAY = ["profile", "tiny-gemma3", "--on", "sim", "-w", "rounds:prefixes=1,prefix=64,output=2,rounds=2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work folder with a run file in it."""
    shutil.copy(GOLDEN / "schema1-rounds.kvrun", tmp_path / "a.kvrun")
    monkeypatch.delenv("KVTUNE_OUTPUT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def browser(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A browser that writes what it was given into this file."""
    opened, program = here / "opened", here / "browser"
    program.write_text(f"#!{sys.executable}\nimport sys\nopen({str(opened)!r}, 'w').write(sys.argv[1])\n")
    program.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{program} %s")
    monkeypatch.setattr("webbrowser._tryorder", None)
    return opened


def test_commands_write_where_the_command_line_says_then_where_the_variable_does(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def replay(query: ProfileQuery, setup: Setup, lab: object) -> int:
        asked.append(query.output)
        return 0

    monkeypatch.setattr("kvtune.cli.profile.replay", replay)
    assert run(REPLAY) == 0 and output_folder() == Path("reports")
    monkeypatch.setenv("KVTUNE_OUTPUT", "from-variable")
    assert run(REPLAY) == 0 and output_folder() == Path("from-variable")
    assert run([*REPLAY, "-o", "named"]) == 0
    assert [str(output) for output in asked] == ["reports", "from-variable", "named"]


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_leaves_results_and_errors(
    here: Path, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTUNE_OUTPUT", ".")
    assert run(["report", "last", "--console"]) == 0
    assert capsys.readouterr().err == "last is a.kvrun\n"
    assert run([flag, "report", "last", "--console"]) == 0
    captured = capsys.readouterr()
    assert "12 requests" in captured.out and captured.err == ""
    assert run(["explain", "no-such-file.kvrun", flag]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    condition = "prefix_cache.hit_rate >= 0"
    assert run(["compare", "last", "last", "--fail-on", condition, "--anyway", flag]) == 1
    assert capsys.readouterr().err.startswith("--fail-on holds")


def test_open_opens_the_page_that_was_written(
    here: Path, browser: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", "a.kvrun", "--open"]) == 0
    assert browser.read_text() == (here / "a.html").as_uri()
    browser.unlink()
    (here / "a.html").write_text("drawn before")
    assert run(["report", "a.kvrun", "--open"]) == 0
    assert browser.exists() and (here / "a.html").read_text() == "drawn before"
    assert "--force draws it anew" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.vllm
def test_open_comes_after_the_result_of_profile(
    here: Path, browser: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*REPLAY, "--json", "--open"]) == 0
    page = json.loads(capsys.readouterr().out)["page"]
    assert browser.read_text() == (here / page).as_uri()


def test_without_a_browser_the_page_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert run(["report", "a.kvrun", "--open"]) == 0
    assert "no browser here to open a.html" in capsys.readouterr().err
