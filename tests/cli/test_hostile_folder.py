"""Every command in a folder full of a stranger's modules and programs: none of them runs.

The folder has a module for each name that Python or kvtune imports, and a program for each that is looked up. A
stand-in for vLLM notes that a child imported it, and ends that child. In `make full` the children import the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtune.cli.app import COMMANDS
from tests.choice import first_of
from tests.cli.test_app import commands

GOLDEN = Path(__file__).parents[1] / "golden"
KVTUNE = Path(sys.executable).with_name("kvtune")
STRANGER = 1002
"""Another user's id."""

PACKAGES = ("kvtune", "kvtune/lab", "kvtune/lab/engine", "vllm", "torch", "numpy", "transformers")
MODULES = (
    *sorted(sys.stdlib_module_names),
    *("msgspec", "psutil", "zmq", "yaml", "uvicorn", "aiohttp", "optuna", "sitecustomize", "usercustomize"),
)
PROGRAMS = ("py-spy", "nvidia-smi", "git", "gcc", "cc", "clang", "ps", "uname", "file", "lscpu", "xdg-open")
SERVER = "127.0.0.1:9"
LOAD = "-w rounds:prefixes=2,prefix=64,suffix=8,output=2,rounds=2"

AGENTS = "agents:context=100,tools=20,output=8,turns=3,different=4,hours=0.01"

CHILDLESS = (
    "explain-log log.jsonl --bounds-only",
    f"watch {SERVER} --once",
    f"check {SERVER} --yes",
    f"record {SERVER} --seconds 1 -o recorded.kvrun",
    f"tap {SERVER} --seconds 1 --listen 0 -o tapped.jsonl",
    f"bounds {LOAD}",
    "compare run.kvrun run.kvrun",
    "report run.kvrun --console",
    "runs .",
    "export run.kvrun --perfetto",
    "recipe list",
    "diff nowhere nowhere tiny-opt",
    "schema profile",
    "demo shown",
)
"""Commands that start no child process that imports vLLM."""
CHILDLESS_TOO = (
    f"explain {SERVER} --seconds 1",
    "report run.kvrun --open",
    "doctor",
    "recipe show tiny-opt-cpu",
    "recipe export tiny-opt-cpu -o exported",
)
CHILD = (
    f"profile tiny-opt {LOAD}",
    f"capacity tiny-opt -w {AGENTS} --sessions 2 --no-remedies",
    f"sweep tiny-opt {LOAD} --set slack=0,1",
    f"tune tiny-opt {LOAD} --trials 2 --on sim",
    "explain run.kvrun --tries 0",
    "doctor tiny-opt -- --block-size 32",
    "serve tiny-opt",
)
"""Commands that start a child process which imports vLLM."""
CHILD_TOO = (
    f"profile tiny-opt {LOAD} --on host",
    f"profile tiny-opt {LOAD} --on sim",
    f"profile tiny-opt {LOAD} --on sim --like run.kvrun",
    "explain-log log.jsonl --model tiny-opt",
    "recipe verify tiny-opt-cpu --anyway --rounds 2",
)


def test_every_command_is_tried() -> None:
    assert {line.split()[0] for line in (*CHILDLESS, *CHILD)} == set(COMMANDS) == set(commands())


@dataclass(frozen=True)
class Place:
    """The current folder; where strangers' code leaves a mark; a stand-in for vLLM, which leaves one, too."""

    folder: Path
    ran: Path
    stand_in: Path


def place_in(top: Path, owner: int | None = None) -> Place:
    """Make a folder as it comes out of an archive. `owner`: it is open to all, and what is in it is another user's."""
    made = Place(top / "here", top / "ran", top / "stand-in")
    for folder in (made.folder, made.ran, made.stand_in / "vllm"):
        folder.mkdir(parents=True)
    code = f"open({str(made.ran)!r} + '/' + __name__, 'w').close()\nraise SystemExit('a stranger ran')\n"
    for name in PACKAGES:
        (made.folder / name).mkdir()
        (made.folder / name / "__init__.py").write_text(code)
    for name in MODULES:
        (made.folder / f"{name}.py").write_text(code)
    for name in PROGRAMS:
        (made.folder / name).write_text(f"#!/bin/sh\necho > '{made.ran}/{name}'\n")
        (made.folder / name).chmod(0o755)
    (made.folder / ".numba_config.yaml").write_text("cache_dir: ./code\n")
    (made.folder / "run.kvrun").write_bytes((GOLDEN / "schema1-real.kvrun").read_bytes())
    (made.folder / "log.jsonl").write_text('{"prompt": [1, 2, 3, 4]}\n{"prompt": [1, 2, 3, 5]}\n')
    (made.stand_in / "vllm" / "__init__.py").write_text(
        f"open({str(made.stand_in)!r} + '/imported', 'w').close()\nraise ImportError('a stand-in')\n"
    )
    if owner is not None:
        for path in (made.folder, *made.folder.rglob("*")):
            os.chown(path, owner, owner)
        made.folder.chmod(0o1777)
    return made


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return place_in(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Place:
    if os.getuid() != 0:
        pytest.skip("only root can make files of another user")
    return place_in(tmp_path_factory.mktemp("shared"), STRANGER)


def run(place: Place, line: str, *, stand_in: bool = True) -> bool:
    """Run a command, in which nothing of the folder may run. Return whether a child imported the stand-in for vLLM."""
    imported = place.stand_in / "imported"
    for mark in (imported, *place.ran.iterdir()):
        mark.unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f":.:{os.environ['PATH']}:"}
    environment["KVTUNE_OUTPUT"] = str(place.ran.parent / "out")
    if stand_in:
        environment["PYTHONPATH"] = str(place.stand_in)
    done = subprocess.run(
        [KVTUNE, *line.split()],
        cwd=place.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert [path.name for path in place.ran.iterdir()] == [], done.stderr
    assert "a stranger ran" not in done.stdout + done.stderr
    assert "kvtune: unexpected" not in done.stderr and "Got unexpected" not in done.stderr
    return imported.exists()


@pytest.mark.parametrize(
    "line", [*CHILDLESS[:5], *(pytest.param(line, marks=pytest.mark.full) for line in CHILDLESS[5:])]
)
def test_no_command_runs_what_lies_in_the_current_folder(own: Place, line: str) -> None:
    assert not run(own, line)


@pytest.mark.vllm
@pytest.mark.parametrize("line", first_of(CHILD))
def test_no_child_imports_what_lies_in_the_current_folder(own: Place, line: str) -> None:
    assert run(own, line)


@pytest.mark.vllm
@pytest.mark.parametrize("line", ["explain run.kvrun --tries 0", "serve tiny-opt"])
def test_no_child_imports_what_another_user_put_into_a_shared_folder(shared: Place, line: str) -> None:
    assert run(shared, line)


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.parametrize("line", [*CHILDLESS_TOO, *CHILD_TOO])
def test_nor_does_any_other_way_to_start_one(own: Place, shared: Place, line: str) -> None:
    assert run(own, line) == run(shared, line) == (line in CHILD_TOO)


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("line", [CHILD[0], CHILD[3], CHILD[4], CHILD_TOO[3]])
def test_no_engine_imports_what_lies_in_the_current_folder(own: Place, line: str) -> None:
    """The engine, the simulator, doctor's child and vLLM's server."""
    run(own, line, stand_in=False)
