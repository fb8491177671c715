"""Makes a line of the core raise, wherever an engine runs it; finds the lines and the overrides that there are."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import kvtune.plugin.core

ROOT = Path(kvtune.plugin.core.__file__).parent
PACKAGES = ("cache", "policies", "steps", "tokens", "outputs")

COMMITS = {
    "SteadyDecode._commit": "adds 1 to counters of requests that were checked, and takes what vLLM hands over",
    "SteadyUpdate._append": "appends tokens that were checked, and has vLLM hash full blocks",
    "Planned.put": "appends tokens that were checked; vLLM's detokenizer reads them",
    "EngineRows.learn": "the message has the only copy of which slot is whose",
    "EngineRows.name": "the same",
    "EngineRows.__init__": "the same",
    "columns_of": "the message has the only copy of the tokens",
    "ColumnReader.process": "the calls of the above; the rest is in a `try`",
    "_placed": "puts a step's outputs in order; without it the step has none",
}
"""Functions that change vLLM's objects and have no other way, with the reason. None of them holds a rule."""
OF_ONE_CALLER = "ColumnCollector."
"""Methods of this class run for one request, and its caller gets their errors: test_callers.py."""


class OursError(Exception):
    """What a line raises; no code catches it by this name."""


class Line(NamedTuple):
    file: str
    """Relative to the core's folder."""
    function: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.function}"


@contextmanager
def traced(act: Callable[[CodeType, int], None], wanted: Callable[[CodeType], bool]) -> Iterator[None]:
    """Call `act` before each line of the functions that are wanted; what it raises, the line raises."""

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            act(frame.f_code, frame.f_lineno)
        return in_function

    def called(frame: FrameType, event: str, _: Any) -> Any:
        return in_function if event == "call" and wanted(frame.f_code) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


def is_core(code: CodeType) -> bool:
    file = Path(code.co_filename)
    return file.parent.parent == ROOT and file.parent.name in PACKAGES


Load = Callable[[bool, Any], Any]
"""Runs an engine, asynchronous or not; the second argument is a context for the part of it that is looked at."""


@cache
def run_by(load: Load, asynchronous: bool) -> frozenset[Line]:
    """The lines of the core that a load runs."""
    found: set[Line] = set()

    def note(code: CodeType, number: int) -> None:
        found.add(Line(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname, number))

    load(asynchronous, traced(note, is_core))
    return frozenset(found)


def lines_of(load: Load, asynchronous: bool) -> list[Line]:
    """The lines of the core that a load runs and that may raise."""
    return sorted(filter(may_raise, run_by(load, asynchronous)))


@contextmanager
def raising(line: Line) -> Iterator[None]:
    """While this lasts, the line raises each time it is reached."""

    def fail(code: CodeType, number: int) -> None:
        if number == line.number:
            raise OursError("ours")

    def wanted(code: CodeType) -> bool:
        return code.co_filename.endswith(f"/core/{line.file}") and _has(code, line.number)

    with traced(fail, wanted):
        yield


@cache
def _has(code: CodeType, number: int) -> bool:
    return any(number == line for _, _, line in code.co_lines())


def may_raise(line: Line) -> bool:
    """Whether a line is to be guarded: not the guard of an override itself, no commit, and no function's first line."""
    name = line.function
    if name in COMMITS or name.startswith((OF_ONE_CALLER, *(f"{commit}.<" for commit in COMMITS))):
        return False
    tree = _tree(line.file)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line.number <= (
            node.end_lineno or 0
        ):
            if name.split(".")[-1] != node.name or line.number == node.lineno:
                continue
            owner = name.rpartition(".")[0]
            replaces = is_override(line.file, owner, node.name) or "wrap" in owner
            if any(isinstance(one, ast.Try) and one.lineno == line.number for one in ast.walk(node)):
                return False
            return _in_try(node, line.number) or not (replaces or _is_guard(node, line.number))
    return False


def _is_guard(function: ast.AST, number: int) -> bool:
    """Whether a line of a function is a call of `attempt`, `later` or `settle`."""
    return any(
        node.lineno <= number <= (node.end_lineno or 0)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("attempt", "later", "settle", "retire")
    )


def _in_try(function: ast.AST, number: int) -> bool:
    """Whether a line of a function stands in the body of a `try` that catches what it raises."""
    return any(
        first.lineno <= number <= (last.end_lineno or 0)
        for node in ast.walk(function)
        if isinstance(node, ast.Try) and node.handlers
        for first, last in [(node.body[0], node.body[-1])]
    )


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@cache
def overrides() -> frozenset[tuple[str, str, str]]:
    """File, class and name of each method of the core that replaces one of vLLM's."""
    found = set()
    for package in PACKAGES:
        for module in pkgutil.iter_modules([str(ROOT / package)]):
            name = f"kvtune.plugin.core.{package}.{module.name}"
            for kind in vars(importlib.import_module(name)).values():
                if inspect.isclass(kind) and kind.__module__ == name:
                    file = f"{package}/{module.name}.py"
                    found |= {(file, kind.__qualname__, method) for method in replaced_by(kind)}
    return frozenset(found)


def replaced_by(kind: type) -> set[str]:
    """The methods of vLLM's classes, or of dict, that a class of the core replaces."""
    heirs = [kind, *MIXED_INTO.get(kind.__qualname__, ())]
    theirs = {
        name
        for heir in heirs
        for base in _resolved(heir).__mro__
        if base.__module__.startswith("vllm.") or base is dict
        for name, value in vars(base).items()
        if callable(value) or isinstance(value, property)
    }
    mine = {name for name, value in vars(kind).items() if inspect.isfunction(value) and name != "__init__"}
    return mine & theirs


MIXED_INTO: dict[str, tuple[Any, ...]] = {
    "NoopSlots": ("vllm.v1.core.kv_cache_manager:KVCacheManager",),
    "SteadyDecode": ("vllm.v1.core.sched.scheduler:Scheduler",),
    "SteadyUpdate": ("vllm.v1.core.sched.scheduler:Scheduler",),
    "Queues": ("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue",),
}
"""Classes of the core that stand in for a class of vLLM's without being derived from it."""


def _resolved(heir: type | str) -> type:
    if isinstance(heir, type):
        return heir
    module, _, name = heir.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def is_override(file: str, owner: str, name: str) -> bool:
    return (file, owner, name) in overrides()
