"""Builds a policy by its name. Runs in EngineCore."""

from __future__ import annotations

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.policies import PoolView
from kvtune.plugin.core.policies.chat import Chat
from kvtune.plugin.core.policies.in_order import First, InOrder, Lru, Pin
from kvtune.plugin.core.policies.two_class import TwoClass

ORDERS: dict[str, type[InOrder]] = {kind.name: kind for kind in (First, TwoClass, Chat, Pin, Lru)}


def make(name: str, pool: PoolView, settings: CoreSettings) -> InOrder:
    """Build the policy of that name for a pool."""
    return ORDERS[name](pool, settings)
