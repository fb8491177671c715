"""How long copies between the KV cache and a tier of host memory take. Plain data."""

from __future__ import annotations

import msgspec

GIB = 1 << 30


class CopyTime(msgspec.Struct, frozen=True, kw_only=True):
    """How long a copy between the KV cache and a tier of host memory takes.

    store_gib_s: speed of copies to the tier. load_gib_s: of copies from the tier. 0 GiB/s: the bytes take no time.
    latency_s: added to each copy.
    """

    store_gib_s: float = 25.0
    load_gib_s: float = 25.0
    latency_s: float = 0.0

    def seconds(self, size: int, gib_s: float) -> float:
        return self.latency_s + (size / (gib_s * GIB) if gib_s else 0.0)


INSTANT = CopyTime(store_gib_s=0.0, load_gib_s=0.0)
"""Copies within memory, as a CPU engine makes them: done when they are submitted."""
