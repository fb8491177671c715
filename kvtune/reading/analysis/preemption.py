"""What preemptions cost: tokens computed twice, by request and cause. Run -> Preemption. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtune.data.run.types import Run

MOST_REQUESTS = 10
"""A summary names at most this many requests, those that computed most twice."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """`tokens`: computed twice, None if not recorded: by an older kvtune, without probes, by a server.

    `misses` by cause add up to them. `requests`: those that were preempted. `computed_tokens`: all tokens that the run
    computed, these included. `worst`: the requests that computed most twice, with their tokens by cause.
    """

    preemptions: int
    requests: int
    tokens: int | None = None
    computed_tokens: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)
    worst: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """The tokens computed twice, of all that the run computed."""
        return (
            self.tokens / self.computed_tokens if self.tokens is not None and self.computed_tokens else None
        )

    def plain(self) -> dict[str, Any]:
        return {
            "preemptions": self.preemptions,
            "requests": self.requests,
            "tokens": self.tokens,
            "share": self.share,
            "causes": dict(self.causes),
            "worst": {name: dict(causes) for name, causes in self.worst.items()},
        }


def preemption(run: Run) -> Preemption | None:
    """Return what the run's preemptions cost; None if there was none."""
    table = run.table("requests")
    counts = table["preemptions"]
    if not counts.sum():
        return None
    preemptions, requests = int(counts.sum()), int((counts > 0).sum())
    twice = run.header.extra.computed_twice
    if run.header.source != "sim" and not twice:
        return Preemption(preemptions, requests)
    rows = {row: causes for row, causes in twice.items() if _is_row(row, len(counts))}
    causes: dict[str, int] = {}
    for request in rows.values():
        for cause, tokens in request.items():
            causes[cause] = causes.get(cause, 0) + tokens
    worst = sorted(rows, key=lambda row: (-sum(rows[row].values()), int(row)))[:MOST_REQUESTS]
    return Preemption(
        preemptions,
        requests,
        sum(causes.values()),
        int(run.table("steps")["scheduled_tokens"].sum()),
        causes,
        {str(table["id"][int(row)]): rows[row] for row in worst},
    )


def _is_row(text: str, rows: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12 and int(text) < rows
