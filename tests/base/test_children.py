"""Child processes: one module starts them, and nothing of the current folder runs in them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtune.base import children

PACKAGE = Path(children.__file__).parents[1]
STARTS = {
    "subprocess": "Popen run call check_call check_output getoutput getstatusoutput",
    "os": "system popen startfile posix_spawn posix_spawnp execl execle execlp execlpe execv execve execvp "
    "execvpe spawnl spawnle spawnlp spawnlpe spawnv spawnve spawnvp spawnvpe",
    "asyncio": "create_subprocess_exec create_subprocess_shell subprocess",
    "multiprocessing": "Process Pool Manager get_context set_start_method set_executable",
    "concurrent.futures": "ProcessPoolExecutor",
    "shutil": "which",
    "webbrowser": "open open_new open_new_tab get",
    "typer": "launch",
    "click": "launch edit",
    "pty": "spawn fork",
}
"""Names that start a process or look one up on PATH. `os.fork` is none: a fork imports nothing by itself."""
WHOLE = ("webbrowser", "pty", "multiprocessing.pool", "multiprocessing.context", "_posixsubprocess", "popen2")
"""Modules that nothing but kvtune/base/children.py may import."""


def other_ways(source: str) -> list[str]:
    """The names in a module that start processes or look programs up; types in annotations are none."""
    tree = ast.parse(source)
    types = {
        id(inner)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if isinstance(annotation := getattr(node, field, None), ast.AST)
        for inner in ast.walk(annotation)
    }
    called: dict[str, str] = {}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                called[alias.asname or alias.name.partition(".")[0]] = alias.name
                found += [alias.name] if alias.name in WHOLE else []
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [module] if module in WHOLE else []
            found += [f"{module}.{a.name}" for a in node.names if a.name in STARTS.get(module, "").split()]
        elif isinstance(node, ast.Constant) and node.value in {*STARTS, *WHOLE} - {"os", "asyncio", "typer"}:
            found.append(f"{node.value!r}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in types:
            owner = ast.unparse(node.value)
            module = called.get(owner, owner)
            found += [f"{module}.{node.attr}"] if node.attr in STARTS.get(module, "").split() else []
    return found


@pytest.mark.lint
def test_no_other_module_starts_a_process() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path != Path(children.__file__)]
    assert len(modules) > 200
    found = {
        str(path.relative_to(PACKAGE)): ways for path in modules if (ways := other_ways(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\nsubprocess.run(['ls'])",
        "import subprocess as s\nstart = s.Popen",
        "from subprocess import check_output",
        "import os\nos.execvp('ls', ['ls'])",
        "import os as o\no.system('ls')",
        "def f():\n    from os import posix_spawn",
        "import asyncio\nasyncio.create_subprocess_exec('ls')",
        "import multiprocessing\nmultiprocessing.get_context('spawn').Process()",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import shutil\nshutil.which('ps')",
        "import webbrowser",
        "import importlib\nimportlib.import_module('subprocess')",
    ],
)
def test_the_search_finds_every_way(source: str) -> None:
    assert other_ways(source)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules and programs of a stranger."""
    monkeypatch.chdir(tmp_path)
    for name in ("gc", "contextlib", "msgspec", "json", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger ran')")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho a stranger ran\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: ./code\ncuda_driver: ./library.so\n")
    return tmp_path


GRANDCHILD = """
import contextlib, json, multiprocessing, msgspec, subprocess, sys
def work(queue): queue.put(sys.path)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    code = "import contextlib, json, msgspec, sys; print(json.dumps(sys.path))"
    spawned = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    print(json.dumps([sys.path, queue.get(), json.loads(spawned)]))
    child.join()
"""


@pytest.mark.parametrize("searched", ["", ":", ".:", "./:..:", "own:.", "{home}:", ":{home}:."])
def test_no_module_of_the_current_folder_is_imported_by_a_child_or_what_it_starts(
    hostile: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, searched: str
) -> None:
    home = tmp_path_factory.mktemp("home")
    (home / "grandchild.py").write_text(GRANDCHILD)
    monkeypatch.setenv("PYTHONPATH", searched.format(home=home))
    command = children.python("grandchild") if "home" in searched else [sys.executable, "-c", "import json"]
    done = children.answer(command)
    assert (done.returncode, done.stderr) == (0, "")
    if "home" in searched:
        for path in json.loads(done.stdout):
            assert str(home) in path, "what the user put on PYTHONPATH is found"
            assert not {"", ".", str(hostile)} & set(path)


def test_the_same_folder_does_run_without_it(hostile: Path) -> None:
    # Another test of this process may have run kvtune's own start, which sets the variable.
    unsafe = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "kvtune.answers.doctor.child"],
        capture_output=True,
        text=True,
        check=False,
        env=unsafe,
    )
    assert "a stranger ran" in done.stderr


@pytest.mark.parametrize("path", ["", ".", ":/usr/bin", "/usr/bin:", "bin:.:./:/usr/bin", "/nonexistent"])
def test_no_program_of_the_current_folder_is_found(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("PATH", path)
    assert (children.program("nvidia-smi") or "/").startswith("/")
    assert children.program("nvidia-smi") != str(hostile / "nvidia-smi")
    assert all(Path(folder).is_absolute() for folder in children.safe(os.environ).get("PATH", "/").split(":"))


def test_a_program_that_was_not_looked_up_is_not_started() -> None:
    for begin in (children.start, children.answer):
        with pytest.raises(ValueError, match="no absolute path"):
            begin(["nvidia-smi"])
    with pytest.raises(ValueError, match="no absolute path"):
        children.become(["ls"], {})


def test_a_browser_of_the_current_folder_is_not_opened(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": ":.:/bin", "BROWSER": "nvidia-smi"})
    seen: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: seen.append(os.environ["PATH"]) or True)
    assert children.browse("file:///page") and seen == ["/bin"]


def test_the_environment_is_kept_but_for_what_searches_the_current_folder() -> None:
    made = children.safe({"A": "1", "PATH": ":/bin:.", "LD_LIBRARY_PATH": ":", "PYTHONSAFEPATH": ""})
    assert made == {"A": "1", "PATH": "/bin", "PYTHONSAFEPATH": "1", **children.UNLESS_SET}
    assert children.safe({"NUMBA_CACHE_DIR": "/mine"})["NUMBA_CACHE_DIR"] == "/mine"


@pytest.mark.vllm
def test_numba_takes_neither_code_nor_a_library_from_the_current_folder(hostile: Path) -> None:
    code = "from numba import config; print(repr((config.CACHE_DIR, config.CUDA_DRIVER)))"
    assert children.answer([sys.executable, "-c", code]).stdout == "('', '')\n"


def starts() -> Iterator[str]:
    """The modules that kvtune runs as child processes."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "children.python":
                yield ast.literal_eval(node.args[0])


@pytest.mark.lint
def test_every_child_is_a_module_of_kvtune() -> None:
    found = sorted(starts())
    assert "kvtune.lab.sim.worker" in found and "kvtune.lab.engine.serve" in found
    for module in found:
        assert (PACKAGE.parent / f"{module.replace('.', '/')}.py").exists(), module
