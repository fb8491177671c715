"""What four stock servers of vLLM 0.32 published while `tests/watch/load.py` sent its load, seed 1: KV events, the
client's log with the hits that the server reported, and /metrics at the end. Recorded once; no vLLM is needed.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvtune.watch.events import Received, decoded
from kvtune.workload.logged import Logged

FOLDER = Path(__file__).with_name("recorded")
NAMES = ("full_attention", "sliding_windows", "sliding_windows_large_pool", "states")


@dataclass(frozen=True)
class Recorded:
    payloads: Sequence[tuple[int, bytes]]
    log: Sequence[Logged]
    metrics: str

    def received(self, start: int = 0) -> list[Received]:
        return [Received(0, decoded(payload)) for _, payload in self.payloads[start:]]

    def sequential(self) -> list[Logged]:
        """The requests that came one after another."""
        return [one for one in self.log if not one.name.startswith(("same", "together"))]


@cache
def recorded(name: str) -> Recorded:
    document = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    return Recorded(
        [(number, base64.b64decode(text)) for number, text in document["batches"]],
        [Logged(**row) for row in document["log"]],
        document["metrics"],
    )
