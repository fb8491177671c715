"""What bounded a server in a setting that was tried: its limits, its load, what was scraped, and the truth."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtune.servers.watch.metrics import Scrape, read
from kvtune.servers.watch.regime import Limits

RECORDED = Path(__file__).with_name("recorded")
"""`regimes.xz` and `edges.xz`: `RECORD_TO=FOLDER pytest -m full tests/servers/watch/test_regime_truth.py`."""


@dataclass(frozen=True)
class Engine:
    """A server's limits. `step_us`: of a step of a timed device; None: the CPU engine. `told`: /server_info is open."""

    seats: int
    step_tokens: int
    blocks: int
    step_us: float | None = None
    token_us: float = 0.0
    told: bool = True
    longest: int = 2048


@dataclass(frozen=True)
class Load:
    """As many requests at once; after each one a pause. `words`: of a text, always the same, in place of ids."""

    clients: int
    prompt: int
    output: int
    pause_s: float = 0.0
    stream: bool = False
    words: int = 0
    warm_s: float = 1.5


@dataclass(frozen=True)
class Truth:
    """Shares of a time, by the witness. `waited`: requests were left waiting; `held`: of that time, by each case.

    `inside`: of the time of clients that ask again at once, what their requests were in the scheduler.
    """

    empty: float
    waited: float
    held: dict[str, float]
    preempted: int
    device: float
    inside: float = 1.0

    def holds(self, regime: str) -> bool:
        if regime == "idle":
            return self.empty > 0.5
        if regime == "host-bound":
            return self.device < 0.5 or self.inside <= 0.5
        if regime == "pool-bound":
            return self.preempted > 0 or self._most("pool")
        if regime == "seat-bound":
            return self._most("seats")
        return regime == "cannot tell" or (self._most("steps") and self.device >= 0.5)

    def _most(self, case: str) -> bool:
        return self.waited > 0.5 and self.held.get(case, 0.0) > 0.5


@dataclass(frozen=True)
class Tried:
    """One setting: what was found, with what was known, and the truth."""

    engine: Engine
    load: Load
    limits: Limits
    texts: list[tuple[float, str]]
    truth: Truth
    found: str

    @property
    def scrapes(self) -> list[Scrape]:
        return [read(text, at) for at, text in self.texts]


def recorded(name: str) -> list[Tried]:
    return msgspec.json.decode(lzma.decompress((RECORDED / f"{name}.xz").read_bytes()), type=list[Tried])
