"""Compares the symbols of the installed vLLM with those of a known version (its manifest).

Contract: imports nothing of vLLM, and takes a few milliseconds for files with the manifest's checksums. In other files
each symbol's parameters and the hash of its syntax tree are compared (the same hash on Python 3.11 to 3.13). A symbol
that is already imported must also be the one in its file: only vLLM and kvtune may have replaced it.
`bench/versions/manifest.py` writes the manifest of the installed vLLM.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from kvtune.data.installed import release, source_path
from kvtune.plugin.vllm.symbols import MOVED, SYMBOLS, Symbol

MANIFESTS = Path(__file__).parent / "manifests"
Manifest = dict[str, Any]
"""Each module has `sha256` of its file, and `symbols`: name -> {parameters, ast}."""


def known_versions() -> list[str]:
    """Return the versions that have a manifest, oldest first."""
    versions = (path.stem.removeprefix("vllm-") for path in MANIFESTS.glob("vllm-*.json"))
    return sorted(versions, key=release)


def read(version: str) -> Manifest:
    """Read the manifest of a known version."""
    manifest: Manifest = json.loads((MANIFESTS / f"vllm-{version}.json").read_text(encoding="utf-8"))
    return manifest


class Source:
    """The files of the installed vLLM; each is read once, and parsed at most once."""

    def __init__(self) -> None:
        self._read = functools.cache(_read)
        self._describe = functools.cache(lambda module: describe(self._read(module) or b"", names_in(module)))

    def difference(self, manifest: Manifest, symbol: Symbol) -> str:
        """Say in one line how a symbol differs from its entry in the manifest; empty if it does not."""
        homes = (symbol.module, *MOVED.get(str(symbol), ()))
        home = next((m for m in homes if symbol.name in manifest.get(m, {}).get("symbols", ())), "")
        if not home:
            return f"{symbol} is not in the manifest"
        source = self._read(home)
        if source is None:
            return f"module {home} is missing"
        name = f"{home}.{symbol.name}"
        if hashlib.sha256(source).hexdigest() != manifest[home]["sha256"]:
            want, have = manifest[home]["symbols"][symbol.name], self._describe(home).get(symbol.name)
            if have is None:
                return f"{name} is gone"
            if symbol.whole and have["parameters"] != want["parameters"]:
                return f"{name} takes other parameters"
            if symbol.whole and have["ast"] != want["ast"]:
                return f"{name} has another body"
        loaded = sys.modules.get(home)
        if loaded is not None and not _is_original(loaded, symbol.name):
            return f"{name} was replaced in this process"
        return ""


def _read(module: str) -> bytes | None:
    path = source_path(module)
    return None if path is None else path.read_bytes()


def names_in(module: str) -> tuple[str, ...]:
    """Return the symbols that a module defines in any known version."""
    moved = (name for name, homes in MOVED.items() if module in homes)
    return (*SYMBOLS.get(module, ()), *(name.rpartition(".")[2] for name in moved))


def describe(source: bytes, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return parameters and hash of the named functions and classes in a source file; missing ones are left out."""
    tree = ast.parse(source)
    symbols: dict[str, dict[str, Any]] = {}
    for name in names:
        node: Any = tree
        for part in name.split("."):
            node = _definition(node, part)
        if node is not None:
            symbols[name] = {"parameters": _parameters(node), "ast": fingerprint(node)}
    return symbols


def fingerprint(node: ast.AST) -> str:
    """Return a hash of the code without docstrings, comments, positions, and fields that only some Pythons have."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _definition(node: Any, name: str) -> Any:
    """Return the last definition of a name in a body: the one that is valid after import."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    definitions = [n for n in getattr(node, "body", ()) if isinstance(n, kinds) and n.name == name]
    return definitions[-1] if definitions else None


def _parameters(node: Any) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return []
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    if a.vararg or a.kwonlyargs:
        names.append(f"*{a.vararg.arg}" if a.vararg else "*")
    names += [p.arg for p in a.kwonlyargs]
    return names + ([f"**{a.kwarg.arg}"] if a.kwarg else [])


_IGNORED = frozenset({"type_params", "type_comment", "kind", "ctx", "type_ignores"})


def _canonical(node: Any) -> str:
    if isinstance(node, list):
        return "[" + ",".join(map(_canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name in _IGNORED or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list) and _is_docstring(value[0]):
            value = value[1:]
        parts.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_original(module: Any, name: str) -> bool:
    """Whether the loaded symbol is the one in its file, or was wrapped only by vLLM or by kvtune."""
    value: Any = module
    for part in name.split("."):
        value = vars(value).get(part) if isinstance(value, type) else getattr(value, part, None)
    if isinstance(value, type):
        return bool(value.__module__ == module.__name__)
    folders = (Path(sys.modules["vllm"].__file__ or "").parent, Path(__file__).parents[2])
    ours = tuple(f"{folder}/" for folder in folders)
    while value is not None:
        value = getattr(value, "__func__", value)
        value = value.fget if isinstance(value, property) else value
        code = getattr(value, "__code__", None)
        if code is not None and not str(Path(code.co_filename)).startswith(ours):
            return False
        value = getattr(value, "__wrapped__", None)
    return True
