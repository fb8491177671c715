"""A seed draws the order of tests, a part of the files keeps it, and one command repeats a red run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import order

LEANING = "seen = []\ndef test_first(): seen.append(1)\ndef test_second(): assert seen\n"
"""A file whose second test passes only behind its first."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of tests in the order of tests/order.py, one of them with a test that leans on another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KVTUNE_KEEP_DURATIONS", "1")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text(Path(order.__file__).read_text())
    (tmp_path / "test_lean.py").write_text(LEANING)
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text("".join(f"def test_{n}(): pass\n" for n in range(9)))
    return tmp_path


def run(tree: Path, *words: str) -> tuple[int, list[str], str]:
    """The exit code, the tests in the order in which they ended, and all that was printed."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist", *words]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)
    ended = re.findall(r"^(test_\w+\.py::\w+) (?:PASSED|FAILED)", done.stdout, re.M)
    return done.returncode, ended, done.stdout


def test_a_seed_gives_one_order_and_a_part_of_the_files_keeps_it(tree: Path) -> None:
    orders = {seed: run(tree, "--seed", str(seed))[1] for seed in (1, 2)}
    assert orders[1] != orders[2]
    assert all(sorted(names) == sorted(orders[1]) and len(names) == 20 for names in orders.values())
    part = [name for name in orders[1] if not name.startswith("test_b.py")]
    assert run(tree, "--seed", "1", "test_lean.py", "test_a.py")[1] == part
    for names in orders.values():  # the tests of a file stay together
        files = [name.partition("::")[0] for name in names]
        assert len([file for file, before in zip(files, ["", *files], strict=False) if file != before]) == 3


@pytest.mark.full
def test_a_test_that_leans_on_another_is_red_and_the_printed_command_repeats_it(tree: Path) -> None:
    seeds = {
        order.place(seed, "test_lean.py::test_first") < order.place(seed, "test_lean.py::test_second"): seed
        for seed in range(20)
    }
    assert run(tree, "--seed", str(seeds[True]))[0] == 0
    assert order.read_durations().keys() == {"test_a.py", "test_b.py", "test_lean.py"}
    code, _, said = run(tree, "--seed", str(seeds[False]), "-n", "2", "--dist", "loadfile")
    assert code == 1
    [command] = re.findall(r"^gw\d failed; this repeats what it ran: \S+ -m pytest (.+)", said, re.M)
    code, _, said = run(tree, *command.split())
    assert code == 1 and "FAILED test_lean.py::test_second" in said
