"""Options of every day: --quiet, --open, the output folder from KVTUNE_OUTPUT or a file."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from kvtune.cli.profile import ProfileQuery
from kvtune.data.run.config import output_folder
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


def test_the_output_folder_is_the_command_lines_then_the_variables_then_the_files(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output_folder() == Path("reports")
    (here / "kvtune.toml").write_text('output = "from-file"\n')
    inner = here / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert output_folder() == here / "from-file"
    monkeypatch.setenv("KVTUNE_OUTPUT", "from-variable")
    assert output_folder() == Path("from-variable")


def test_commands_write_where_variable_and_file_say(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Setup, Path]] = []

    def replay(query: ProfileQuery, setup: Setup, lab: object) -> int:
        asked.append((setup, query.output))
        return 0

    monkeypatch.setattr("kvtune.cli.profile.replay", replay)
    (here / "pyproject.toml").write_text('[tool.kvtune]\noutput = "from-file"\nslo = "ttft=500"\n')
    assert run(REPLAY) == 0
    monkeypatch.setenv("KVTUNE_OUTPUT", "from-variable")
    assert run(REPLAY) == 0
    assert run([*REPLAY, "-o", "named", "--slo", "tpot=50"]) == 0
    assert [str(output) for _, output in asked] == ["from-file", "from-variable", "named"]
    assert [setup.load.slo for setup, _ in asked] == [{"ttft": 500.0}, {"ttft": 500.0}, {"tpot": 50.0}]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("kvtune.toml", "outptu = 'x'\n", "kvtune has no setting outptu"),
        ("kvtune.toml", "output = 3\n", "output = 3 is not text"),
        ("kvtune.toml", "open = 'yes'\n", "open = 'yes' is not true or false"),
        ("kvtune.toml", "output = \n", "not readable TOML"),
        ("pyproject.toml", "[tool.kvtune]\ncore = 'stock'\n", "kvtune has no setting core"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it_and_the_command_goes_on(
    here: Path, name: str, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / name).write_text(text)
    assert run(["runs", "."]) == 0
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"kvtune: {here / name}: ") and complaint in line and "a.kvrun" in said.out


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["runs", "-h"]])
def test_version_and_help_read_no_file(
    here: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "kvtune.toml").write_text("garbage ][")
    monkeypatch.setattr("kvtune.cli.app.read_config", lambda: pytest.fail("it was read"))
    assert run(words) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", ["-q", "--quiet", "kvtune.toml"])
def test_quiet_leaves_results_and_errors(
    here: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTUNE_OUTPUT", ".")
    assert run(["report", "last", "--console"]) == 0
    assert capsys.readouterr().err == "last is a.kvrun\n"
    if how == "kvtune.toml":
        (here / how).write_text("quiet = true\n")
    flags = [how] if how.startswith("-") else []
    assert run([*flags, "report", "last", "--console"]) == 0
    captured = capsys.readouterr()
    assert "12 requests" in captured.out and captured.err == ""
    assert run(["explain", "no-such-file.kvrun", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    condition = "prefix_cache.hit_rate >= 0"
    assert run(["compare", "last", "last", "--fail-on", condition, "--anyway", *flags]) == 1
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
