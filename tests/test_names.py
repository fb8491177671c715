"""Names say what they name: variables, and classes that one file imports. Docstrings begin with a subject or a verb.

No expression hides an `if`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
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


OPENINGS = ("Of", "By", "For", "With", "To")
OPENINGS_LATER: dict[str, int] = {}
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


HIDDEN_IFS_LATER: dict[str, int] = {}
"""How many expressions of a room still hide an `if`; these only fall."""


def hidden_ifs(tree: ast.AST) -> list[int]:
    """Return the lines of conditional expressions that are statements, or that hold another as one of their values."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp))
        or (isinstance(node, ast.IfExp) and ast.IfExp in (type(node.body), type(node.orelse)))
    ]


def test_no_expression_hides_an_if() -> None:
    """A conditional expression is one value or another: what only acts, and what chooses twice, is an `if`."""
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        lines = hidden_ifs(ast.parse(path.read_text(encoding="utf-8")))
        found.setdefault(name.parts[0], []).extend(f"{name}:{line}" for line in lines)
    assert [places for room, places in found.items() if len(places) > HIDDEN_IFS_LATER.get(room, 0)] == []


@pytest.mark.parametrize(
    ("code", "hides"),
    [
        ("start() if late else stop()", True),
        ("x = 1 if a else 2 if b else 3", True),
        ("x = (1 if b else 2) if a else 3", True),
        ("x = 1 if a else f(2 if b else 3)", False),
        ("if late:\n    start()", False),
    ],
)
def test_an_expression_that_hides_an_if_is_found(code: str, hides: bool) -> None:
    assert bool(hidden_ifs(ast.parse(code))) == hides


def twins(sources: Mapping[str, str]) -> set[str]:
    """Return, of sources by module, the names of classes of two modules that one module imports, or has and imports."""
    trees = {module: ast.parse(source) for module, source in sources.items()}
    classes = {
        module: {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for module, tree in trees.items()
    }
    found = set()
    for module, tree in trees.items():
        names = {(name, module) for name in classes[module]}
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {
                    (each.name, node.module)
                    for each in node.names
                    if each.name in classes.get(node.module, ())
                }
                modules |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = modules.get(node.value.id, "")
                names |= {(node.attr, owner)} if node.attr in classes.get(owner, ()) else set()
        found |= {
            f"{module}: {name}" for name, times in Counter(name for name, _ in names).items() if times > 1
        }
    return found


def test_no_file_has_two_classes_of_one_name() -> None:
    """Where two meet, a name says whose it is; an alias would have each reader learn it again."""
    paths = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    assert (
        twins({module.removesuffix(".__init__"): path.read_text("utf-8") for module, path in paths.items()})
        == set()
    )


@pytest.mark.parametrize(
    "code",
    [
        "from a import Row\nfrom b import Row as Other",
        "import a\nfrom a import Row\nclass Row: ...",
        "from x import a\nfrom b import Row\na.Row",
    ],
)
def test_two_classes_of_one_name_are_found(code: str) -> None:
    row = "class Row: ..."
    assert twins({"a": row, "b": row, "x.a": row, "c": code}) == {"c: Row"}
