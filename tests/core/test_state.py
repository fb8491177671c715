"""What the core records belongs to one EngineCore; nothing else of the core keeps what an engine changes."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtune.core
from kvtune.core import state
from kvtune.core.breaker import Breaker
from kvtune.knobs import CoreSettings

OF_PROCESS = {
    "core/state.py: _books",  # the books in use
    "core/state.py: clock",  # theirs
    "core/plugin.py: _registered",  # classes of vLLM are patched once
    "core/cpu_tier/install.py: _installed",
    "core/freeze.py: _frozen_here",  # the garbage collector is the process's
    "core/freeze.py: _failed",
    "core/breaker.py: _of_process",  # parts that patch classes of workers and front end
}
"""Module-level state that engines of one process may share."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    state.clear()
    yield
    state.clear()


def test_each_engine_has_books_and_a_clock() -> None:
    state.activate(CoreSettings())
    state.part("pool", True)
    installed = state.books()
    one, other = installed.branch(lambda: 1.0), installed.branch(lambda: 2.0)
    with state.using(one):
        assert state.clock() == 1.0 and state.active()
        state.gauge(lambda: {"given": 3})
        state.count("audits")
    with state.using(other):
        assert state.clock() == 2.0
        state.gauge(lambda: {"given": 4})
        Breaker().trip(ValueError("it broke"))
    assert state.clock is time.monotonic and state.books() is installed
    assert one.state()["counters"] == {"given": 3, "audits": 1} and one.state()["parts"]["pool"]
    assert other.state()["counters"] == {"given": 4} and not other.state()["parts"]["pool"]
    assert any("it broke" in note for note in other.notes) and not one.notes
    whole = state.merged([one.state(), other.state()])
    assert whole is not None
    assert whole["counters"] == {"given": 7, "audits": 1} and not whole["parts"]["pool"]
    assert state.counters() == {}, "nothing of theirs is in the process's books"


def test_no_other_module_of_the_core_keeps_what_an_engine_changes() -> None:
    """A fleet of simulated engines shares every module: what one of them changes must stand on its objects."""
    root = Path(kvtune.core.__file__).parent
    found = {
        f"core/{path.relative_to(root)}: {name}" for path in root.rglob("*.py") for name in changeable(path)
    }
    assert found == OF_PROCESS


def changeable(path: Path) -> Iterator[str]:
    """Module-level names that functions assign, or that begin as an empty container."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        empty = (
            isinstance(value, ast.Dict | ast.List | ast.Set)
            and not (value.keys if isinstance(value, ast.Dict) else value.elts)
        ) or (isinstance(value, ast.Call) and not value.args and not value.keywords)
        if empty and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (one.id for one in targets if isinstance(one, ast.Name))
