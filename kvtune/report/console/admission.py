"""Requests that overtook others, for a terminal: the `admission` part of a run's `--json` object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtune.report.console.collector import MakeTable
from kvtune.units import count, ms, percent

if TYPE_CHECKING:
    from rich.console import RenderableType


def admission_rows(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the console and the page say alike, as names and values."""
    if not counts["in_force"]:
        return [("requests were admitted", "as they came: longest_prefix was not in force, see the notes")]
    admitted = counts["admitted"]
    return [
        ("admitted before earlier ones", f"{count(counts['ahead'])} of {count(admitted)} requests"),
        ("overtaken", f"{count(counts['overtaken'])} ({percent(counts['overtaken'], admitted)})"),
        ("longest extra wait", ms(counts["longest_wait_s"] * 1000)),
        (
            "the bound decided",
            f"{count(counts['by_age'])} admissions (admission_age_s {counts['age_s']:g})",
        ),
    ]


def admission_view(summary: Mapping[str, Any], table: MakeTable) -> RenderableType | None:
    """A table for rich; None for a run without it."""
    counts = summary.get("admission")
    return table(("admission", "by cached prefix"), admission_rows(counts)) if counts else None
