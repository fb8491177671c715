"""What a workload's builder returns: requests, and when they may be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtune.workload.types import Request


@dataclass(frozen=True, slots=True)
class Draft:
    """As in `Workload`: `concurrency` None means that only arrivals decide; `barrier` separates rounds."""

    requests: Sequence[Request]
    concurrency: int | None = None
    barrier: bool = False
