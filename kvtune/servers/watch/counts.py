"""What is counted of a server, or of several: one dataclass, whose sums and differences have a meaning. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from kvtune.data.causes import UNHEARD


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most of a count that events alone do not tell exactly."""

    least: int = 0
    most: int = 0

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.least + other.least, self.most + other.most)

    def __sub__(self, other: Bounds) -> Bounds:
        return Bounds(max(0, self.least - other.least), max(0, self.most - other.most))


@dataclass(kw_only=True)
class Counts:
    """Tokens, blocks and requests. `missed`: tokens whose cause is known, by cause. `loaded`: hits of a connector.

    Beside other servers: `held`, `kept`, `still` as in others.py, and `blind`, tokens of prompts that were computed
    without an event. A difference is never below nothing.
    """

    queries: int = 0
    hits: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    evicted: int = 0
    lost: int = 0
    loaded: int = 0
    recomputed: int = 0
    requests: int = 0
    held: Bounds = Bounds()
    kept: Bounds = Bounds()
    still: int = 0
    blind: int = 0

    @property
    def misses(self) -> int:
        return self.queries - self.hits

    @property
    def unexplained(self) -> int:
        """Misses without a cause yet."""
        return self.misses - self.missed.total()

    @property
    def untold(self) -> int:
        """Missed tokens of whole blocks of which nobody knows whether they were computed before."""
        return sum(self.missed[cause] for cause in UNHEARD)

    def __add__(self, other: Counts) -> Counts:
        return self._each(other, lambda value, another: value + another)

    def __sub__(self, other: Counts) -> Counts:
        return self._each(
            other, lambda value, less: max(0, value - less) if isinstance(value, int) else value - less
        )

    def copied(self, **more: Any) -> Counts:
        """Return the counts as they are now."""
        return self._each(Counts(**more), lambda value, another: value + another)

    def _each(self, other: Counts, made: Callable[[Any, Any], Any]) -> Counts:
        names = (each.name for each in fields(Counts))
        return Counts(**{name: made(getattr(self, name), getattr(other, name)) for name in names})
