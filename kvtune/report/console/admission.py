"""Requests that overtook others, for a terminal: the `admission` part of a run's `--json` object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvtune.units import count, ms, percent


def admission_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the console and the page say alike, as names and values."""
    if not found["in_force"]:
        return [("requests were admitted", "as they came: longest_prefix was not in force, see the notes")]
    admitted = found["admitted"]
    return [
        ("admitted before earlier ones", f"{count(found['ahead'])} of {count(admitted)} requests"),
        ("overtaken", f"{count(found['overtaken'])} ({percent(found['overtaken'], admitted)})"),
        ("longest extra wait", ms(found["longest_wait_s"] * 1000)),
        (
            "the bound decided",
            f"{count(found['by_age'])} admissions (admission_age_s {found['age_s']:g})",
        ),
    ]


def admission_view(summary: Mapping[str, Any], table: Callable[..., Any]) -> Any:
    """A table for rich; None for a run without it."""
    found = summary.get("admission")
    return table(("admission", "by cached prefix"), admission_rows(found)) if found else None
