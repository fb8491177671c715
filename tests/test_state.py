"""No state of the process: what functions of kvtune/ change is handed to them. Exceptions stand here, with reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtune

pytestmark = pytest.mark.lint

ROOT = Path(kvtune.__file__).parent

ALLOWED = {
    "plugin/vllm/plugin_state.py: STATE": "what lives as long as a process of vLLM; `reset()` forgets it",
    "base/masking.py: _call": "the secrets that this command was given, of its context alone",
    "cli/notices.py: _errors": "where a `with quiet()` block writes errors, of this context alone",
    "requests/loads/synthetic.py: _most": "what a `with at_most()` block may build, of this context alone",
    "data/show/charts.py: _bundling": "the thread that warms up and the page make the bundle once",
    "data/show/charts.py: _bundle": "one script of an installed package",
    "data/show/page.py: _environment": "the templates of this package, and no run's data",
    "data/show/page.py: _asset": "files of this package, some ten",
    "plugin/core/steps/empty.py: with_noop_slots": "a class made of a class: whoever asks gets the same",
    "lab/sim/fast/scheduler.py: _with_columns": "a class made of a class: whoever asks gets the same",
    "requests/text/kinds.py: atoms": "a line cut by fixed patterns; 1,024 of them",
    "requests/text/kinds.py: masked": "a line cut by fixed patterns; 1,024 of them",
    "data/run/file.py: UPGRADES": "empty until a schema of run files has been succeeded by another; nobody adds to it",
    "requests/log/templates.py: _reads_parts": "what a template's text says; 32 of them, in the child that renders",
}
"""Module-level names that functions change, and functions that keep what they returned."""

MUTATORS = {
    *(
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "extendleft",
        "insert",
        "pop",
        "popitem",
        "popleft",
    ),
    *("push", "put", "remove", "reverse", "rotate", "set", "setdefault", "sort", "update", "write"),
}
CACHES = {"cache", "lru_cache"}
CHANGING = {
    *(
        "Barrier",
        "BoundedSemaphore",
        "Condition",
        "ContextVar",
        "Counter",
        "Event",
        "Lock",
        "OrderedDict",
        "Queue",
    ),
    *(
        "RLock",
        "Semaphore",
        "SimpleQueue",
        "WeakKeyDictionary",
        "WeakSet",
        "WeakValueDictionary",
        "bytearray",
        "count",
    ),
    *("cycle", "defaultdict", "deque", "iter", "local", "open"),
}
"""What a call of returns something that changes when it is used, whatever it is called with."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Module:
    """A module's names: those that it binds, and where those come from that it imports from kvtune."""

    def __init__(self, place: str, text: str) -> None:
        self.place, self.tree = place, ast.parse(text)
        self.names: dict[str, str] = {}
        self.made: dict[str, ast.expr] = {}
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtune"):
                for alias in node.names:
                    self.names[alias.asname or alias.name] = origin(node.module or "", alias.name)
        for node in self._top(self.tree.body):
            if isinstance(node, Function | ast.ClassDef):
                self.names[node.name] = f"{place}: {node.name}"
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for one in ast.walk(target) if target is not None else ():
                    if isinstance(one, ast.Name):
                        self.names[one.id] = f"{place}: {one.id}"
                        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                            self.made[one.id] = node.value

    def _top(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """The statements that run when the module is imported, without those in classes."""
        for node in body:
            yield node
            for inner in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
                if not isinstance(node, Function | ast.ClassDef):
                    yield from self._top(inner)


def origin(module: str, name: str) -> str:
    """Where a name stands that is imported, in words of the table; of a module, its file."""
    path = ROOT.joinpath(*module.split(".")[1:])
    if (path / f"{name}.py").is_file():
        return str((path / f"{name}.py").relative_to(ROOT))
    if path.is_dir():
        path /= "__init__"
    return f"{path.relative_to(ROOT)}.py: {name}"


def states(modules: list[Module]) -> set[str]:
    changing = {
        f"{module.place}: {name}"
        for module in modules
        for name, node in module.classes.items()
        if changes_itself(node)
    }
    return {found for module in modules for found in states_of(module, changing)}


def states_of(module: Module, changing: set[str]) -> Iterator[str]:
    for name, value in module.made.items():
        if is_changing(value) or (called(value) and module.names.get(called(value)) in changing):
            yield f"{module.place}: {name}"
    for node, within in defined(module.tree):
        if CACHES & {name_of(each) for each in node.decorator_list}:
            yield f"{module.place}: {'.'.join((*within, node.name))}"
    for node in ast.iter_child_nodes(module.tree):
        yield from changed(module, node, {}, "", in_function=False)


def is_changing(value: ast.expr) -> bool:
    """Whether a value is an empty container, or of a kind that is there to be changed."""
    if isinstance(value, ast.List | ast.Set | ast.Dict):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Call):  # lru_cache(maxsize=1)(function)
        return is_changing(value.func)
    kind = called(value)
    return kind in CHANGING | CACHES or (
        kind in ("dict", "list", "set") and not value.args and not value.keywords
    )


def called(value: ast.expr) -> str:
    return name_of(value) if isinstance(value, ast.Call) else ""


def name_of(node: ast.AST) -> str:
    """The last name of what is called, decorated with or read."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def defined(
    node: ast.AST, within: tuple[str, ...] = ()
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, tuple[str, ...]]]:
    """The functions and methods that are made once, and not in each call of another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, within
        elif not isinstance(child, ast.Lambda):
            yield from defined(child, (*within, child.name) if isinstance(child, ast.ClassDef) else within)


def changed(
    module: Module, node: ast.AST, known: dict[str, str], of_class: str, *, in_function: bool
) -> Iterator[str]:
    """What functions change of the names outside of them. `known`: names of functions that hide those, by meaning."""
    if isinstance(node, ast.ClassDef):
        of_class = node.name
    if isinstance(node, Function):
        arguments = [
            one.arg
            for one in (
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            )
            if one is not None
        ]
        body = node.body if isinstance(node.body, list) else [node.body]
        bound, outer = set(arguments), set()
        for one in (each for part in body for each in own(part)):
            if isinstance(one, ast.Global):
                outer |= set(one.names)
                yield from (f"{module.place}: {name}" for name in one.names)
            elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                bound.add(one.id)
        known = known | dict.fromkeys(bound - outer, "")
        if of_class and "cls" in arguments[:1]:
            known["cls"] = f"{module.place}: {of_class}"
        in_function = True
    if in_function and (target := target_of(node)) is not None:
        root, attributes = target
        place = known.get(root, module.names.get(root, ""))
        is_module = place.endswith(".py")
        if place and attributes and (is_module or root == "cls" or root in module.classes):
            yield f"{place}{': ' if is_module else '.'}{attributes[0]}"
        elif place and not is_module:
            yield place
    for child in ast.iter_child_nodes(node):
        yield from changed(module, child, known, of_class, in_function=in_function)


def own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's code without those of functions in it."""
    yield node
    if not isinstance(node, Function | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from own(child)


def target_of(node: ast.AST) -> tuple[str, tuple[str, ...]] | None:
    """The name and attributes of what a node changes: `name.attribute =`, `name[..] =`, `name.attribute.append(..)`."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        inner = node if isinstance(node, ast.Attribute) else node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        inner = node.func.value
    else:
        return None
    attributes: list[str] = []
    while isinstance(inner, ast.Attribute | ast.Subscript):
        if isinstance(inner, ast.Attribute):
            attributes.append(inner.attr)
        inner = inner.value
    return (inner.id, tuple(reversed(attributes))) if isinstance(inner, ast.Name) else None


def changes_itself(node: ast.ClassDef) -> bool:
    """Whether a method but those that make an object changes the object."""
    return any(
        (target := target_of(inner)) is not None and target[0] == "self" and target[1]
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and method.name not in ("__init__", "__post_init__", "__new__", "__setstate__")
        for inner in ast.walk(method)
    )


def test_functions_change_nothing_that_outlives_their_call() -> None:
    modules = [
        Module(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
    ]
    found = states(modules)
    assert found == set(ALLOWED), (found - set(ALLOWED), set(ALLOWED) - found)
