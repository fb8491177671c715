"""Each reader x each damage: it is read, or refused in one line that steers no terminal; nothing is written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtune.terminal import STEERING
from tests.choice import each_value
from tests.simulator import run
from tests.tools.fuzz.damages import CONTENTS, PLACES, swapped
from tests.tools.fuzz.mutate import json_changed, lines_changed
from tests.tools.fuzz.readers import READERS, judged
from tests.tools.fuzz.servers import SERVERS

FILES = [name for name in READERS if name not in SERVERS]
COMMANDS = [name for name, reader in READERS.items() if reader.command is not None]
OPENED = [name for name in FILES if name not in ("log", "step cost")]
"""Without the readers of bytes that kvtune holds already."""

FEW = ("recipe", "settings", "tapped")
"""Readers whose every value is tried in `make test`; those of the others in `make full`."""
SAID = (
    *(
        "half",
        "no UTF-8",
        "lists in lists",
        "control characters",
        "a value that steers",
        "a name that steers",
    ),
    *("nothing", "a folder", "a pipe", "a device without end", "a link to itself"),
)
"""Damages whose words commands print; each reader has met all of them."""
UNASKED = ("settings", "project")
"""Files that kvtune looks for by itself: a pipe or a folder in their place means no settings."""


def good(name: str) -> bytes:
    """The smallest of a reader's files."""
    return min((data for _, data in READERS[name].seeds()), key=len)


def left(folder: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.lstat().st_mode) for path in folder.rglob("*"))


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("KVTUNE_OUTPUT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", FILES)
def test_a_good_file_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / READERS[name].name
    path.write_bytes(good(name))
    assert judged(name, path) == ("", True)


@pytest.mark.parametrize(("name", "damage"), each_value(FILES, list(CONTENTS)))
def test_a_damaged_file_is_read_or_refused_in_one_line(name: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / READERS[name].name
    path.write_bytes(CONTENTS[damage](good(name)))
    before = left(tmp_path)
    assert judged(name, path)[0] == ""
    assert left(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else [pytest.mark.full])
        for name in FILES
        if READERS[name].structural in (json_changed, lines_changed)
    ],
)
def test_each_value_may_be_anything(name: str, tmp_path: Path) -> None:
    path = tmp_path / READERS[name].name
    wrong = {}
    for content in swapped(good(name)):
        path.write_bytes(content)
        if (why := judged(name, path)[0]) != "":
            wrong[why] = content
    assert wrong == {}


@pytest.mark.parametrize(("name", "place"), each_value(OPENED, list(PLACES)))
def test_what_is_no_file_is_refused_in_one_line(name: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / READERS[name].name
    PLACES[place](path, good(name))
    before = left(tmp_path)
    why, read = judged(name, path)
    assert why == ""
    if name not in UNASKED and (name, place) != ("journal", "nothing"):
        assert not read and left(tmp_path) == before


@pytest.mark.parametrize(("name", "damage"), each_value(COMMANDS, SAID))
def test_a_command_says_it_in_one_line_that_steers_nothing(
    name: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = READERS[name]
    assert reader.command is not None
    path = tmp_path / reader.name
    if damage in CONTENTS:
        path.write_bytes(CONTENTS[damage](good(name)))
    else:
        PLACES[damage](path, good(name))
    before = left(tmp_path)
    code = run(reader.command(path))
    said = capsys.readouterr()
    assert code in (0, 2), said.err
    assert not STEERING.search(said.out + said.err)
    lines = said.err.splitlines()
    if code:
        assert not said.out and len(lines) <= 2 and lines[0].startswith("kvtune: ")
    assert "unexpected" not in said.err and "Traceback" not in said.err
    assert left(tmp_path) == before
