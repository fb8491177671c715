"""A tier of host memory, for a terminal: the `offload` part of a run's `--json` object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtune.report.console.collector import MakeTable
from kvtune.units import count, ms, percent, size

if TYPE_CHECKING:
    from rich.console import RenderableType


def offload_rows(tier: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows for console and page: name, amount, and a share or a time."""
    prompt, copies = tier["prompt_tokens"], tier["copies"]
    rows = [
        (name, f"{count(tier[key])} tokens", percent(tier[key], prompt))
        for name, key in (
            ("hit in the KV cache", "pool_hit_tokens"),
            ("hit in host memory", "tier_hit_tokens"),
            ("computed", "computed_tokens"),
        )
    ]
    if copies is None:
        return rows
    stored, unread = copies["stored_chunks"], copies["unread_chunks"]
    rows += [
        ("copied to host memory", size(copies["stored_bytes"]), ms(copies["store_s"] * 1000)),
        ("copied back", size(copies["loaded_bytes"]), ms(copies["load_s"] * 1000)),
        (
            "stored and never read again",
            f"{count(unread)} of {count(stored)} chunks",
            percent(unread, stored),
        ),
        ("evicted from host memory", f"{count(copies['evicted_chunks'])} chunks", ""),
        (
            "requests waited for copies",
            f"{count(copies['loads'])} loads",
            f"{ms(copies['wait_s'] * 1000)} in all, {ms(copies['longest_wait_s'] * 1000)} the longest",
        ),
    ]
    if copies["refused"]:
        rows.append(("no room to store", f"{count(copies['refused'])} times", ""))
    return rows


def offload_title(tier: Mapping[str, Any]) -> str:
    return f"host memory: {size(tier['tier_bytes'])}, {tier['policy']}"


def offload_view(summary: Mapping[str, Any], table: MakeTable) -> RenderableType | None:
    """A table for rich; None for a run without a tier."""
    tier = summary.get("offload")
    return table((offload_title(tier), "", "share or time"), offload_rows(tier)) if tier else None
