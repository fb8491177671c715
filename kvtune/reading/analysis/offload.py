"""The hits of a host-memory tier, and its copies: Run -> Offload. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvtune.data.run.types import Run


@dataclass(frozen=True, slots=True)
class Offload:
    """Prompt tokens by source (pool, host memory, computed), and copies, in the measuring phase.

    `copies` is None if it was not recorded (`--probe off`).
    """

    tier_bytes: int
    tier_chunks: int
    policy: str
    prompt_tokens: int
    pool_hit_tokens: int
    tier_hit_tokens: int
    computed_tokens: int
    copies: CopyTotals | None

    @property
    def tier_hit_rate(self) -> float | None:
        return self.tier_hit_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def computed_share(self) -> float | None:
        return self.computed_tokens / self.prompt_tokens if self.prompt_tokens else None

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "tier_hit_rate": self.tier_hit_rate, "computed_share": self.computed_share}


@dataclass(frozen=True, slots=True)
class CopyTotals:
    """Copies to and from host memory. `store_s`, `load_s`: their duration. `wait_s`: summed waits of requests for them.

    `loads`: requests that loaded. `unread_chunks`: stored and never loaded in this run. `refused`: stores for which
    host memory had no room.
    """

    stored_bytes: int
    store_s: float
    loaded_bytes: int
    load_s: float
    loads: int
    wait_s: float
    longest_wait_s: float
    stored_chunks: int
    unread_chunks: int
    evicted_chunks: int
    refused: int


def offload(run: Run) -> Offload | None:
    """Return the hits and copies of host memory, or None if the run had no host memory tier."""
    tier = run.header.engine.settings.get("offload")
    if not isinstance(tier, dict):
        return None
    requests = run.table("requests")
    counted = requests["hit_tokens"] >= 0
    prompt = int(requests["prompt_tokens"][counted].sum())
    hits = int(np.minimum(requests["hit_tokens"], requests["prompt_tokens"])[counted].sum())
    tier_hits = int(requests["tier_hit_tokens"][counted].sum())
    return Offload(
        tier_bytes=int(tier.get("bytes", 0)),
        tier_chunks=int(tier.get("chunks", 0)),
        policy=str(tier.get("policy", "")),
        prompt_tokens=prompt,
        pool_hit_tokens=hits - tier_hits,
        tier_hit_tokens=tier_hits,
        computed_tokens=prompt - hits,
        copies=_copies(run),
    )


def _copies(run: Run) -> CopyTotals | None:
    if "copies" not in run.tables:
        return None
    table = run.table("copies")
    counts = {name: int(table[name].sum()) for name in table if table[name].dtype.kind == "i"}
    stored, reused = counts["stored_chunks"], counts["reused_chunks"]
    return CopyTotals(
        stored_bytes=counts["stored_bytes"],
        store_s=float(table["store_us"].sum()) / 1e6,
        loaded_bytes=counts["loaded_bytes"],
        load_s=float(table["load_us"].sum()) / 1e6,
        loads=counts["loads"],
        wait_s=float(table["wait_us"].sum()) / 1e6,
        longest_wait_s=float(table["longest_wait_us"].max(initial=0.0)) / 1e6,
        stored_chunks=stored,
        unread_chunks=max(0, stored - reused),
        evicted_chunks=counts["evicted_chunks"],
        refused=counts["refused"],
    )


def tier_gib(summary: Mapping[str, Any]) -> float:
    """Return the size in GiB of a run's host memory tier, from the run's `--json` object."""
    tier = summary.get("offload")
    return float(tier["tier_bytes"]) / GIB if tier else 0.0


GIB = 1 << 30
