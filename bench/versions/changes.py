"""What changed between two versions of vLLM: `python -m bench.versions.changes OLD NEW [PART ..]`.

OLD and NEW are folders that hold `vllm/` (an environment's site-packages). Each symbol that differs is printed with
what needs it (parts of the core, the simulator, the probe, events, metrics, the mirror) and a unified diff.
"""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

from kvtune.answers.diff.changes import changed, definition
from kvtune.plugin.vllm.symbols import PARTS, Part, Symbol

OBSERVED: dict[str, Part] = {
    "probe": Part(
        (
            {
                "vllm.v1.core.sched.scheduler": (
                    "Scheduler.__init__",
                    "Scheduler.add_request",
                    "Scheduler.schedule",
                    "Scheduler.update_from_output",
                    "Scheduler._preempt_request",
                    "Scheduler._free_request",
                ),
                "vllm.v1.engine.core": (
                    "EngineCoreProc._process_engine_step",
                    "EngineCore._initialize_kv_caches",
                ),
            },
        )
    ),
    "events": Part(
        (
            {
                "vllm.distributed.kv_events": (
                    "EventBatch",
                    "KVCacheEvent",
                    "BlockStored",
                    "BlockRemoved",
                    "AllBlocksCleared",
                    "KVEventBatch",
                )
            },
        )
    ),
    "metrics": Part(({"vllm.v1.metrics.loggers": ("PrometheusStatLogger",)},)),
    "mirror": Part(  # kvtune/servers/watch/blocks.py
        (
            {
                "vllm.v1.core.single_type_kv_cache_manager": (
                    "FullAttentionManager.find_longest_cache_hit",
                    "SlidingWindowManager.find_longest_cache_hit",
                    "MambaManager.find_longest_cache_hit",
                ),
                "vllm.v1.core.kv_cache_coordinator": ("HybridKVCacheCoordinator.find_longest_cache_hit",),
            },
        )
    ),
}
"""What kvtune wraps or reads without a manifest."""


def difference(old: Path, new: Path, symbol: Symbol) -> list[str]:
    """Return the lines of a diff of the symbol's source."""
    sides = [definition(root, symbol) for root in (old, new)]
    was, now = (_segment(source, symbol.name).splitlines() for _, source, _ in sides)
    before, after = sides[0][0] or "(none)", sides[1][0] or "(gone)"
    return list(difflib.unified_diff(was, now, before, after, lineterm=""))


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
    known = PARTS | OBSERVED
    asked = {name: known[name] for name in arguments[2:] or known}
    for symbol, parts in changed(old, new, asked):
        count += 1
        print(f"\n=== {symbol}  ({', '.join(parts)})")
        print("\n".join(difference(old, new, symbol)))
    print(f"\n{count} symbols changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
