"""With the base alone, each command either works or names the extra that it needs, before any work."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvtune.base.extras import EXTRAS, NEEDS
from kvtune.cli.app import COMMANDS
from tests.choice import first_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BEYOND = (
    "jinja2",
    "altair",
    "vl_convert",
    "optuna",
    "sqlalchemy",
    "scipy",
    "py_spy",
    "vllm",
    "torch",
    "transformers",
)
"""Modules that the base does not install."""
BARE = f"""
import sys
for name in {BEYOND!r}:
    sys.modules[name] = None
from tests.simulator import run
sys.exit(run(sys.argv[1:]))
"""
GOLDEN = ROOT / "tests" / "golden"
RUN = GOLDEN / "schema1-kvtune.kvrun"
LOG = '{"prompt": [1, 2, 3, 4], "answer": [5], "t0": 1.0, "t1": 2.0}\n'

WORKS: dict[str, list[str]] = {
    "bounds": ["bounds", "-w", "rounds:prefixes=2,prefix=64,suffix=8,output=2,rounds=2"],
    "check": ["check", "http://127.0.0.1:9", "--yes"],
    "compare": ["compare", str(RUN), str(RUN)],
    "demo": ["demo", "shown"],
    "diff": ["diff", "nowhere", "0.32"],
    "doctor": ["doctor", "tiny-llama"],
    "explain-log": ["explain-log", "log.jsonl", "--bounds-only"],
    "export": ["export", str(RUN), "--csv", "-o", "tables"],
    "record": ["record", "http://127.0.0.1:9", "-o", "new.kvrun", "--seconds", "1"],
    "recipe list": ["recipe", "list"],
    "recipe show": ["recipe", "show", "tiny-gemma3-cpu"],
    "recipe export": ["recipe", "export", "tiny-gemma3-cpu", "-o", "exported"],
    "runs": ["runs", str(GOLDEN)],
    "schema": ["schema", "profile"],
    "tap": ["tap", "http://127.0.0.1:9", "--seconds", "1", "--listen", "0", "-o", "tapped.jsonl"],
    "watch": ["watch", "http://127.0.0.1:9", "--once"],
}
SAYS = {
    "diff": "nowhere is no version of vLLM, no environment",
    "check": "no server answers at http://127.0.0.1:9",
    "record": "no server answers at http://127.0.0.1:9",
    "watch": "no server answers at http://127.0.0.1:9",
}
"""What a command says that ends with an error for another reason than a package: no server or version is there."""
REFUSED = {
    "profile": ["profile", "tiny-llama"],
    "sweep": ["sweep", "tiny-llama", "-w", "rounds", "--on", "sim"],
    "tune": ["tune", "tiny-llama", "-w", "rounds"],
    "report": ["report", str(RUN)],
    "recipe verify": ["recipe", "verify", "tiny-gemma3-cpu"],
}
ENGINE = {
    "capacity": ["capacity", "tiny-llama", "-w", "agents"],
    "explain": ["explain", str(RUN)],
    "serve": ["serve", "tiny-llama"],
}
"""They need vLLM: tests/servers/watch/test_install.py runs them where neither is installed."""


def bare(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "log.jsonl").write_text(LOG)
    return subprocess.run(
        [sys.executable, "-P", "-c", BARE, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_every_command_is_in_one_list() -> None:
    named = {name.split()[0] for name in (*WORKS, *REFUSED, *ENGINE)}
    assert named == set(COMMANDS)
    assert set(REFUSED) == set(NEEDS)


@pytest.mark.parametrize(
    "name", [*list(WORKS)[:4], *(pytest.param(name, marks=pytest.mark.full) for name in list(WORKS)[4:])]
)
def test_a_base_command_works(name: str, tmp_path: Path) -> None:
    done = bare(WORKS[name], tmp_path)
    if name in SAYS:
        assert SAYS[name] in done.stdout + done.stderr
    else:
        assert done.returncode == 0, done.stderr
    assert "unexpected" not in done.stderr and "pip install 'kvtune[report" not in done.stderr


@pytest.mark.parametrize("name", first_of(list(REFUSED)))
def test_a_command_names_its_extra_before_any_work(name: str, tmp_path: Path) -> None:
    done = bare(REFUSED[name], tmp_path)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert f"kvtune {name} needs " in first and "not installed" in first
    assert second.strip() == f"next: pip install 'kvtune[{NEEDS[name]}]'"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl"]


def test_extras_name_the_packages_of_pyproject() -> None:
    extras = PROJECT["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        asked = extras[extra] + (extras["report"] if "kvtune[report]" in extras[extra] else [])
        for package in packages.values():
            assert any(line.startswith(package + ">") for line in asked), (extra, package)


@pytest.mark.lint
def test_kvtune_imports_only_packages_that_pyproject_names() -> None:
    """The base's modules at import time; the packages of extras and engines inside functions."""
    base = {"typer", "rich", "msgspec", "numpy", "psutil", "yaml", "httpx", "prometheus_client", "zmq"}
    modules = {"yaml": "pyyaml", "prometheus_client": "prometheus-client", "zmq": "pyzmq"}
    names = {line.split(">")[0] for line in PROJECT["dependencies"]}
    assert {modules.get(module, module) for module in base} == names
    imported = set()
    for path in (ROOT / "kvtune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    assert "scipy" not in imported
