"""Makes the policy of a name. Runs in EngineCore."""

from __future__ import annotations

from kvtune.core.policies import Policy, Shelves, density, lru, pin, tiered, two_class
from kvtune.core.settings import CoreSettings


def make(name: str, shelves: Shelves, settings: CoreSettings) -> Policy:
    """The policy of that name over a pool."""
    kinds = {
        "density": density.Density,
        "lru": lru.Lru,
        "pin": pin.Pin,
        "tiered": tiered.Tiered,
        "two_class": two_class.TwoClass,
    }
    return kinds[name](shelves, settings)
