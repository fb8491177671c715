"""Names say what they name: variables. Docstrings begin with a subject or a verb."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

PACKAGE = Path(__file__).parents[1] / "kvtune"
BANNED = (
    *("told", "said", "found", "known", "look", "mark", "life", "stretch", "space", "seat"),
    *("one", "at", "of", "by", "on", "it", "how", "thing", "stuff", "tmp", "obj", "res", "foo", "val", "ret"),
)
LATER = ("servers/watch",)
"""The package that is still to be renamed; nothing is ever added here."""
ALLOWED = {
    "requests/loads": {"by"},
    "requests/log": {"by"},
    "plugin/probe": {"by"},
    "answers/capacity": {"by"},
    "answers/tune": {"space"},
}
"""Names that stay: `by` is a field of JSON, `space` has the type Space."""


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


OPENINGS = ("Of", "By", "For", "With", "To")
OPENINGS_LATER = {"answers/capacity": 7, "answers/states": 1, "servers/watch": 11}
"""How many docstrings of a package still begin so; these only fall."""


def openings(tree: ast.AST) -> list[str]:
    texts = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return [
        text
        for text in texts
        if isinstance(text, str) and text.lstrip().startswith(tuple(f"{word} " for word in OPENINGS))
    ]


def test_no_docstring_begins_with_a_preposition() -> None:
    """Subject, verb, object: "A share of few requests means nothing", not "Of few requests a share ..."."""
    count = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        place = "/".join(path.relative_to(PACKAGE).parts[:2])
        count[place] += len(openings(ast.parse(path.read_text(encoding="utf-8"))))
    assert {place: many for place, many in count.items() if many > OPENINGS_LATER.get(place, 0)} == {}


def test_a_docstring_that_begins_with_a_preposition_is_found() -> None:
    assert (
        len(openings(ast.parse('"""Of a module."""\nX = 1\n"""By name."""\nY = 2\n"""Offers both."""'))) == 2
    )
