"""A variable is named by its type's noun: names that say nothing are refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

PACKAGE = Path(__file__).parents[1] / "kvtune"
BANNED = (
    *("told", "said", "found", "known", "look", "mark", "life", "stretch", "space", "seat"),
    *("one", "at", "of", "by", "on", "it", "how", "thing", "stuff", "tmp", "obj", "res", "foo", "val", "ret"),
)
LATER = ()
"""Packages that are still to be renamed; nothing is ever added here."""
ALLOWED = {
    "requests/loads": {"by"},
    "requests/log": {"by"},
    "plugin/probe": {"by"},
    "answers/capacity": {"by"},
    "answers/tune": {"space"},
    "servers/watch": {"look", "mark", "stretch", "space", "life"},
}
"""Names that stay: `by` is a field of JSON; of the others there is a type of that name, such as Space."""


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each variable, parameter and loop target; not of a class's or a module's field."""
    fields = {
        id(target)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.ClassDef | ast.Module)
        for statement in scope.body
        for target in ast.walk(statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def test_no_variable_has_a_name_that_says_nothing() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        place = "/".join(path.relative_to(PACKAGE).parts[:2])
        names = bindings(ast.parse(path.read_text(encoding="utf-8"))) if place not in LATER else ()
        found |= {
            f"{place}: {name}" for name in names if name in BANNED and name not in ALLOWED.get(place, ())
        }
    assert found == set(), "name them by their type's noun"


@pytest.mark.parametrize("code", ["one = 1", "for at in x: pass", "def f(by): pass", "[told for told in x]"])
def test_a_variable_that_says_nothing_is_found(code: str) -> None:
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    assert set(bindings(ast.parse(f"def g():\n{indented}"))) & set(BANNED)
