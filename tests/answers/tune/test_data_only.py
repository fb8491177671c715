"""Recipes, traces, journals and run files are data: nothing that reads them can execute what they hold."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "kvtune"
READERS = [
    PACKAGE / "data" / "recipe.py",
    *(
        p
        for name in ("answers/tune", "requests/loads", "requests/log", "data/run")
        for p in (PACKAGE / name).glob("*.py")
    ),
]
LOADERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "imp", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}


@pytest.mark.parametrize("path", READERS, ids=lambda p: p.name)
def test_nothing_that_reads_data_can_execute_it(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not LOADERS & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in LOADERS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in CALLS
        elif isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle" or (
                isinstance(node.value, ast.Constant) and not node.value.value
            )
