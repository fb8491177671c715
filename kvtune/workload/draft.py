"""What a workload's builder returns: requests, and when they may be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtune.workload.types import Request


@dataclass(frozen=True, slots=True)
class Draft:
    """The requests of a workload. `concurrency`, `barrier` and `note` are those of `Workload`."""

    requests: Sequence[Request]
    concurrency: int | None = None
    barrier: bool = False
    note: str = ""
