"""Turns the core off at the first error in its own bookkeeping, for good. Runs in EngineCore.

Contract: an error in an eviction policy, the queues, the window rules, the steady path or the columns never reaches the
engine. After the first one, blocks are evicted oldest first, vLLM's own code handles windows, steps and outputs, and
one note says why. No part is switched on again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvtune.core import state

logger = logging.getLogger("vllm.kvtune")

P = ParamSpec("P")
R = TypeVar("R")

SWITCHES = ("pool", "pinning", "steady", "front_end")
"""The switches that an error turns off. `rows` and `empty_blocks` keep no state that could become wrong."""
ATTRIBUTE = "kvtune_breaker"


class Breaker:
    """Turns the core off at its first error. Each KV cache manager, and so each EngineCore, has one breaker."""

    def __init__(self) -> None:
        self.why = ""
        self._hand_back: list[Callable[[], None]] = []

    @property
    def tripped(self) -> bool:
        return bool(self.why)

    def on_trip(self, hand_back: Callable[[], None]) -> None:
        """Register `hand_back`, which turns one part off. The breaker may call it within any part's method."""
        self._hand_back.append(hand_back)

    def attempt(self, act: Callable[P, R], *args: P.args, **options: P.kwargs) -> R | None:
        """Call `act` and return its result. If it raises, turn the core off and return None."""
        try:
            return act(*args, **options)
        except Exception as error:
            self.trip(error)
            return None

    def trip(self, error: Exception) -> None:
        """Turn all parts off and record why. Further calls do nothing."""
        if self.tripped:
            return
        self.why = f"gave up: {type(error).__name__}: {error}"
        for back in self._hand_back:
            back()
        for switch in SWITCHES:
            state.part(switch, False)
        state.note(f"the core {self.why}; vLLM's own code decides from here on")
        logger.error("kvtune: vLLM's own code decides from here on", exc_info=error)


def breaker_of(manager: object) -> Breaker:
    """Return this KV cache manager's breaker; the first call creates it."""
    breaker: Breaker | None = getattr(manager, ATTRIBUTE, None)
    if breaker is None:
        breaker = Breaker()
        setattr(manager, ATTRIBUTE, breaker)
    return breaker
