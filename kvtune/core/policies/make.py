"""Builds a policy by its name. Runs in EngineCore."""

from __future__ import annotations

from kvtune.core.policies import Policy, PoolView
from kvtune.core.policies.chat import Chat
from kvtune.core.policies.in_order import First, InOrder, Lru, Pin
from kvtune.core.policies.two_class import TwoClass
from kvtune.knobs import CoreSettings

ORDERS: dict[str, type[InOrder]] = {kind.name: kind for kind in (First, TwoClass, Chat, Pin, Lru)}


def make(name: str, pool: PoolView, settings: CoreSettings) -> Policy:
    """Build the policy of that name for a pool."""
    return ORDERS[name](pool, settings)
