"""Each reader x each damage: it is read, or refused in one line that steers no terminal; nothing is written."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtune.data.show.terminal import STEERING
from tests.choice import each_value
from tests.fuzz.damages import CONTENTS, PLACES, bombs, swapped
from tests.fuzz.mutate import json_changed, lines_changed
from tests.fuzz.readers import READERS, ROOT, judged
from tests.fuzz.servers import SERVERS
from tests.simulator import run

FILES = [name for name in READERS if name not in SERVERS]
COMMANDS = [name for name, reader in READERS.items() if reader.command is not None]
OPENED = [name for name in FILES if name not in ("log", "step cost", "analyst", "texts")]
"""Without the readers of bytes that kvtune holds already."""

MEMORY = 192 << 20
"""What one input may take, beyond what the process has."""
GUARD_S = 600
"""No reader is near it: tests/base/test_bounded.py counts that it ends; here a hang only must not stop the tests."""
QUICK = ("run", "recipe", "burstgpt", "tapped", "step cost", "metrics")
"""Of each kind of file one; the others in `make full`."""
FEW = ("recipe", "tapped")
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


def all_wrong(name: str) -> dict[str, str]:
    """What is wrong with how a reader takes each damage and bomb. In a child: its memory is limited from now on."""
    wrong, whole = {}, good(name)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        path = Path(folder) / READERS[name].name
        path.write_bytes(whole)
        why, read = judged(name, path)  # and imports what it needs
        assert why == "" and (read or name in SERVERS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
        damaged = ((damage, change(whole)) for damage, change in CONTENTS.items())
        for damage, data in (*damaged, *(bombs(whole) if name != "page" else ())):
            path.write_bytes(data)
            before = left(Path(folder))
            if why := judged(name, path)[0]:
                wrong[damage] = why
            assert left(Path(folder)) == before
    return wrong


def print_all_wrong(names: tuple[str, ...]) -> None:
    """Print it for each reader, in a fork for each: the imports are made once."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(dict(zip(names, pool.map(all_wrong, names, chunksize=1), strict=True))))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        *(pytest.param((n,), id=n, marks=pytest.mark.full) for n in READERS if n not in QUICK),
    ],
)
def test_readers_take_damages_and_bombs_in_little_memory_or_refuse_them_in_one_line(
    names: tuple[str, ...],
) -> None:
    code = f"import tests.fuzz.test_damages as damages; damages.print_all_wrong({names!r})"
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, cwd=ROOT, timeout=GUARD_S
    )
    assert child.returncode == 0
    assert json.loads(child.stdout.decode().splitlines()[-1]) == {name: {} for name in names}


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
    if (name, place) != ("journal", "nothing"):
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
