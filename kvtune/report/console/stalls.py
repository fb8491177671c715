"""Slow tokens for a terminal: their causes, and the worst of them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtune.report.console.collector import MakeTable
from kvtune.report.stalls import advice, cause_rows, lead, why
from kvtune.units import count, ms

if TYPE_CHECKING:
    from rich.console import RenderableType


def stalls_view(s: Mapping[str, Any], table: MakeTable) -> list[RenderableType | None]:
    """A sentence and two tables; nothing where no token was slow. `s` is the `--json` object."""
    from rich.padding import Padding
    from rich.text import Text

    account = s.get("stalls") or {}
    if not (text := lead(account)):
        return []
    worst = [
        (why(stall), f"{stall['start_s']:.3f} s", ms(stall["gap_ms"]), count(stall["gaps"]))
        for stall in account["worst"]
    ]
    return [
        Padding(Text(text), (1, 0, 0, 0)),
        table(("slow tokens", "gaps", "over the median", "share"), cause_rows(account)),
        table(("the worst", "at", "longest", "gaps"), worst),
        Padding(Text(advice(account)), (1, 0, 0, 0)),
    ]
