"""What changed between two versions of vLLM: `python -m kvtune.answers.diff.changes OLD NEW [PART ..]`.

OLD and NEW are folders that hold `vllm/` (an environment's site-packages). Each symbol that differs is printed with
what needs it (parts of the core, the simulator, the probe, events, metrics, the mirror) and a unified diff. Reads
files, imports nothing of vLLM.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtune.plugin.vllm.manifest import describe
from kvtune.plugin.vllm.symbols import MOVED, OBSERVED, PARTS, Symbol


def definition(root: Path, symbol: Symbol) -> tuple[str, str, object]:
    """Return the module below `root` that defines a symbol, its source and its description; empty if it is gone."""
    for module in (symbol.module, *MOVED.get(str(symbol), ())):
        path = root.joinpath(*module.split("."))
        file = next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)
        if file is None:
            continue
        source = file.read_text(encoding="utf-8")
        described = describe(source.encode(), (symbol.name,)).get(symbol.name)
        if described is not None:
            return module, _segment(source, symbol.name), described
    return "", "", None


def changes(old: Path, new: Path, parts: tuple[str, ...]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each changed symbol of these parts: its name, the parts that need it, and the lines of a diff."""
    needed: dict[Symbol, list[str]] = {}
    for name in parts:
        for symbol in dict.fromkeys((PARTS | OBSERVED)[name].symbols()):
            needed.setdefault(symbol, []).append(name)
    for symbol, of_parts in needed.items():
        before, was, described_before = definition(old, symbol)
        after, now, described_after = definition(new, symbol)
        if (before, described_before) == (after, described_after):
            continue
        if not symbol.whole and described_after is not None:
            continue
        lines = difflib.unified_diff(
            was.splitlines(), now.splitlines(), before or "(none)", after or "(gone)", lineterm=""
        )
        yield str(symbol), of_parts, list(lines)


def _segment(source: str, name: str) -> str:
    """Return the source text of a function, class or method."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        nodes = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", "") == part]
        if not nodes:
            return ""
        node = nodes[-1]
    return ast.get_source_segment(source, node) or ""


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__)
        return 2
    old, new = map(Path, arguments[:2])
    count = 0
    for symbol, parts, lines in changes(old, new, tuple(arguments[2:]) or (*PARTS, *OBSERVED)):
        count += 1
        print(f"\n=== {symbol}  ({', '.join(parts)})")
        print("\n".join(lines))
    print(f"\n{count} symbols changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
