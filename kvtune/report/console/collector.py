"""Garbage collection in detail for a terminal: steps with and without collections, culprits, stacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtune.report.names import process_title
from kvtune.units import count, ms, percent

if TYPE_CHECKING:
    from rich.console import RenderableType

MakeTable = Callable[[tuple[str, ...], Sequence[tuple[str, ...]]], "RenderableType | None"]
CULPRITS_SHOWN = 8
FUNCTIONS_SHOWN = 8


def collector_details(s: Mapping[str, Any], table: MakeTable) -> list[RenderableType]:
    """The tables below the collector's, without empty ones. `s` is the `--json` object."""
    tables = [_steps(s, table), *_culprits(s, table), *_stacks(s, table)]
    return [part for part in tables if part is not None]


def _steps(s: Mapping[str, Any], table: MakeTable) -> RenderableType | None:
    joined = s.get("gc_steps") or {}
    rows = []
    for key, title in (("with_collection", "with a collection"), ("without", "without")):
        spread = (joined.get("step_ms") or {}).get(key) or {}
        if spread.get("count"):
            rows.append((title, count(spread["count"]), *(ms(spread[at]) for at in ("p50", "p99", "max"))))
    where = joined.get("collections") or {}
    if rows and where:
        counts = f"{count(where['in_steps'])} in {count(where['steps'])} steps"
        rows.append(
            ("EngineCore's collections", counts, f"{count(where['between_steps'])} between steps", "", "")
        )
    return table(("engine steps", "steps", "median", "p99", "longest"), rows)


def _culprits(s: Mapping[str, Any], table: MakeTable) -> list[RenderableType | None]:
    return [
        table(
            (f"young objects, {process_title(process)}", "made at", "per step", "share"),
            [
                (
                    row["type"],
                    _where(row),
                    count(row["count"]) if row["per_step"] is None else f"{row['per_step']:,.1f}",
                    percent(row["share"], 1),
                )
                for row in sampled["rows"][:CULPRITS_SHOWN]
            ],
        )
        for process, sampled in (s.get("culprits") or {}).items()
    ]


def _stacks(s: Mapping[str, Any], table: MakeTable) -> list[RenderableType | None]:
    parts = []
    for process, sampled in (s.get("stacks") or {}).items():
        rows = [
            (row["function"], _where(row), percent(row["share"], 1))
            for row in (sampled.get("top") or [])[:FUNCTIONS_SHOWN]
        ]
        parts.append(table((f"self time, {process_title(process)}", "where", "share"), rows))
    return parts


def _where(row: Mapping[str, Any]) -> str:
    """File and line, shortened to the last two parts of the path."""
    return f"{'/'.join(str(row['file']).split('/')[-2:])}:{row['line']}" if row.get("file") else "–"
