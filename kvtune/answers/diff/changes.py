"""Which symbols of vLLM differ between two versions. Reads files, imports nothing of vLLM.

`bench/versions/changes.py` prints them with their diffs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvtune.base.files import read_regular
from kvtune.plugin.vllm.manifest import describe
from kvtune.plugin.vllm.symbols import MOVED, Part, Symbol


def definition(root: Path, symbol: Symbol) -> tuple[str, str, object]:
    """Return the module below `root` that defines a symbol, its source and its description; empty if it is gone."""
    for module in (symbol.module, *MOVED.get(str(symbol), ())):
        path = root.joinpath(*module.split("."))
        file = next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)
        if file is None:
            continue
        source = read_regular(file, 4 << 20).decode()
        described = describe(source.encode(), (symbol.name,)).get(symbol.name)
        if described is not None:
            return module, source, described
    return "", "", None


def changed(old: Path, new: Path, parts: Mapping[str, Part]) -> Iterator[tuple[Symbol, list[str]]]:
    """Yield each symbol of these parts that differs, and the parts that need it. `old`, `new`: folders with `vllm/`."""
    needed: dict[Symbol, list[str]] = {}
    for name, part in parts.items():
        for symbol in dict.fromkeys(part.symbols()):
            needed.setdefault(symbol, []).append(name)
    for symbol, of_parts in needed.items():
        before, _, was = definition(old, symbol)
        after, _, now = definition(new, symbol)
        if (before, was) != (after, now) and (symbol.whole or now is None):
            yield symbol, of_parts
