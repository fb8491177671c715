"""No text of a file, a folder or a command line steers the terminal, whatever command prints it."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from kvtune.data.recipe import read_recipe, to_toml
from kvtune.data.run.file import write_run
from tests.cli.terminal import seen
from tests.golden.synthetic import replace_header
from tests.hostile import FAKES, STEERS, fakes, steered, steering_recipe, steering_run
from tests.simulator import run

ROOT = Path(__file__).parents[2]
RECIPE = sorted((ROOT / "recipes").glob("*.toml"))[0]
COLOURS = re.compile(rb"\x1b\[[0-9;]*m|\r\n")


RUNS = ("real", "rounds", "failed", "chat", "evictions")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs whose texts are all hostile, by that text; tests work on copies."""
    made = {text: tmp_path_factory.mktemp("runs") for text in (STEERS, FAKES)}
    for text, folder in made.items():
        for name in RUNS:
            write_run(steering_run(name, text), folder / f"{name}.kvrun")
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: dict[str, Path]) -> Path:
    """A folder with hostile runs and recipes, which is the output folder and the current one."""
    made = tmp_path / f"out{STEERS}"
    shutil.copytree(runs[STEERS], made)
    (made / f"torn{STEERS}.kvrun").write_bytes(b"PK")
    monkeypatch.setenv("KVTUNE_OUTPUT", str(made))
    monkeypatch.chdir(made)
    return made


COMMANDS = [
    ["runs"],
    ["runs", "--state", "unreadable"],
    ["runs", STEERS],
    ["runs", "--state", STEERS],
    ["report", "last", "--console"],
    ["report", "rounds.kvrun", "--console"],
    ["report", "failed.kvrun", "--console"],
    ["report", "chat.kvrun", "--console"],
    ["report", "evictions.kvrun"],
    ["report", f"{STEERS}.kvrun"],
    ["report", f"torn{STEERS}.kvrun"],
    ["compare", "real.kvrun", "rounds.kvrun"],
    ["compare", "real.kvrun", "rounds.kvrun", "--anyway"],
    ["compare", "rounds.kvrun", "rounds.kvrun"],
    ["compare", "real.kvrun", "rounds.kvrun", "--anyway", "--md"],
    ["compare", "real.kvrun", "rounds.kvrun", "--fail-on", STEERS],
    ["export", "real.kvrun", "--csv"],
    ["export", "real.kvrun", "--perfetto", "-o", f"no{STEERS}/such"],
    ["explain", "failed.kvrun", "--tries", "0"],
    ["explain", "chat.kvrun", "--tries", "0"],
    ["bounds", "-w", f"trace:path={STEERS}"],
    ["bounds", "-w", STEERS],
    ["bounds", "-w", "decode", "--model", STEERS],
    ["profile", "tiny-opt", "-w", STEERS],
    ["profile", "tiny-opt", "--on", STEERS],
    ["recipe", "show", STEERS],
    ["recipe", STEERS],
    [STEERS],
]


@pytest.mark.parametrize(
    "arguments", COMMANDS, ids=lambda arguments: " ".join(arguments).replace(STEERS, "<steers>")
)
def test_no_command_lets_a_files_text_steer_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    run(arguments)
    told = capsys.readouterr()
    assert told.out or told.err
    assert steered(told.out) == "" and steered(told.err) == ""


@pytest.mark.parametrize("name", ["real", "evictions"])
def test_a_page_shows_what_would_reorder_or_hide_its_text(folder: Path, name: str) -> None:
    """Also in the commands that it copies."""
    assert run(["report", f"{name}.kvrun", "-o", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert steered(re.sub(r"<script.*?</script>", "", page, flags=re.S)) == ""
    data = re.findall(r'<script type="application/json".*?</script>', page, re.S)
    assert data and all(steered(text) == "" and "\\u001b" not in text for text in data)
    assert "\ufffd" in page


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: dict[str, Path]) -> Path:
    """The same folder, where every text begins lines that look like kvtune's."""
    made = tmp_path / f"out{FAKES}"
    shutil.copytree(runs[FAKES], made)
    write_run(replace_header(steering_run("rounds", FAKES), source="server"), made / "server.kvrun")
    (made / f"torn{FAKES}.kvrun").write_bytes(b"PK")
    (made / "recipes").mkdir()
    (made / "recipes" / f"name{FAKES}.toml").write_text("no toml", encoding="utf-8")
    monkeypatch.setenv("KVTUNE_OUTPUT", str(made))
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize(
    "arguments",
    [
        *([word.replace(STEERS, FAKES) for word in arguments] for arguments in COMMANDS),
        ["explain", "server.kvrun"],
        ["report", "server.kvrun", "--console"],
        ["recipe", "list"],
        ["recipe", "show", "mine.toml"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(FAKES, "<fakes>"),
)
def test_no_text_of_a_file_begins_a_line_that_looks_like_kvtunes(
    lines: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    hostile = steering_recipe(read_recipe(RECIPE), FAKES)
    tables = plain(hostile)
    tables["recipe"] = plain(read_recipe(RECIPE))["recipe"]  # its texts must be lines
    (lines / "mine.toml").write_text(to_toml({**json.loads(json.dumps(tables))}), encoding="utf-8")
    run(arguments)
    told = capsys.readouterr()
    assert told.out or told.err
    assert fakes(told.out) == [] and fakes(told.err) == []


@pytest.mark.parametrize("arguments", [["list"], ["show", "mine.toml"], ["show", "mine.toml", "--raw"]])
def test_recipes_do_not_steer_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    hostile = steering_recipe(read_recipe(RECIPE))
    text = to_toml({**json.loads(json.dumps(plain(hostile)))})
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    (folder / f"name{STEERS}.toml").write_text("no toml", encoding="utf-8")
    run(["recipe", *arguments])
    told = capsys.readouterr()
    assert told.out or told.err
    assert steered(told.out) == "" and steered(told.err) == ""


def plain(recipe: object) -> dict[str, object]:
    """A hand-written recipe's tables."""
    import msgspec

    tables: dict[str, dict[str, object]] = msgspec.to_builtins(recipe)
    tables["recipe"] |= {"checksum": "", "status": "hand-written"}
    return dict(tables)


@pytest.mark.parametrize("arguments", [["runs"], ["report", "last"]])
def test_json_holds_the_text_as_it_is_and_only_escaped(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run([*arguments, "--json"]) in (0, 2)
    out = capsys.readouterr().out
    assert steered(out) == ""
    if arguments == ["runs"]:
        models = {row["model"] for row in json.loads(out)["runs"]}
        assert f"tiny-gemma3{STEERS}" in models


@pytest.mark.parametrize("arguments", [["runs"], ["report", "rounds.kvrun", "--console"]])
def test_on_a_terminal_only_kvtunes_own_colours_are_left(folder: Path, arguments: list[str]) -> None:
    code, raw = seen(*arguments, folder=folder, KVTUNE_OUTPUT=str(folder))
    assert code == 0
    assert b"\x1b[" in raw
    assert steered(COLOURS.sub(b"\n", raw).decode()) == ""


@pytest.mark.lint
def test_rich_is_drawn_on_one_kind_of_console_only() -> None:
    """`kvtune.data.show.terminal.console` replaces what steers; a Console made elsewhere would not."""
    others = [
        path
        for path in (ROOT / "kvtune").rglob("*.py")
        if path.name != "terminal.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
    ]
    assert others == []


def test_memory_that_is_not_there_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(run: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvtune.reading.analysis.run.RunAnalysis.__init__", lambda *_: too_much(_))
    assert run(["report", "rounds.kvrun", "--console"]) == 1
    assert "not enough memory" in capsys.readouterr().err
