"""What a replay writes down while it runs: columns that grow. Simulator's process only."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from kvtune.probe.pool import PoolWatch


@dataclass(slots=True)
class ReplayJournal:
    """What a replay writes down while it runs; record.py makes the tables of it."""

    hits: Any
    sent_s: Any
    first_s: Any
    finished_s: Any
    output: Any
    preemptions: Any
    token_request: array[int] = field(default_factory=lambda: array("i"))
    token_s: array[float] = field(default_factory=lambda: array("d"))
    written: set[int] = field(default_factory=set)  # requests whose token of this step is in `token_request`
    steps: list[array[Any]] = field(default_factory=list)
    tiers: tuple[str, ...] = ()
    pool: list[tuple[float, int, int, int, int]] = field(
        default_factory=list
    )  # t, tier, evicted, demoted, free
    digests: array[int] = field(default_factory=lambda: array("L"))
    refused: dict[int, str] = field(default_factory=dict)
    jumps: int = 0
    jumped_steps: int = 0

    def pool_news(self, watch: PoolWatch, start_s: float, free: int) -> None:
        """What the pool evicted and demoted for the step that starts now."""
        news = watch.news()
        if news is not None:
            counted = enumerate(zip(*news, strict=True))
            self.pool += [(start_s, tier, *counts, free) for tier, counts in counted if any(counts)]
