"""What a builder returns before it has a name: requests, and how they are let go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtune.workload.types import Request


@dataclass(frozen=True, slots=True)
class Draft:
    """As in `Workload`: `concurrency` None lets arrivals alone decide, `barrier` separates rounds."""

    requests: Sequence[Request]
    concurrency: int | None = None
    barrier: bool = False
