"""Turns the core off at the first error in its own bookkeeping, for good. Runs in EngineCore.

Contract: no error of the core's own code reaches the engine. After the first one every object is vLLM's own again: the
pool with its one queue, the managers of windows and requests, the scheduler, a step's outputs, sampled tokens. One note
says why. No part is switched on again.

An override of a method of vLLM's is one of these:

| override | after an error |
|---|---|
| calls vLLM's method, and ours by `attempt` | ours is skipped |
| runs ours in a `try` | its effects are undone, `trip`, vLLM's method runs |
| is called inside a loop of vLLM's pool | ours is skipped by `later`: the pool is handed back when the loop has ended |

tests/plugin/core/test_guards.py finds every override and every line of the core that an engine runs, and makes each
raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvtune.plugin.core import state
from kvtune.plugin.vllm.plugin_state import STATE

logger = logging.getLogger("vllm.kvtune")

P = ParamSpec("P")
R = TypeVar("R")

SWITCHES = ("pool", "pinning", "keep_states", "steady", "empty_blocks", "rows", "front_end")
"""The switches that an error turns off: all but those of the garbage collector and of layouts, which keep no books."""
ATTRIBUTE = "kvtune_breaker"


class Breaker:
    """Turns the core off at its first error. Each KV cache manager, and so each EngineCore, has one breaker."""

    def __init__(self) -> None:
        self.why = ""
        self.pending: Exception | None = None
        """An error after which the core is turned off as soon as vLLM's pool has ended its loop over blocks."""
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

    def later(self, act: Callable[P, R], *args: P.args, **options: P.kwargs) -> R | None:
        """Call `act` and return its result. If it raises, return None and remember to turn the core off: `settle`."""
        if self.pending is None:
            try:
                return act(*args, **options)
            except Exception as error:
                self.pending = error
        return None

    def settle(self) -> None:
        """Turn the core off if `later` has met an error. Called where every block is free or in use, in no loop."""
        if self.pending is not None:
            self.trip(self.pending)

    def trip(self, error: Exception) -> None:
        """Turn all parts off and record why. Further calls do nothing."""
        if self.tripped:
            return
        self.why = f"gave up: {type(error).__name__}: {error}"
        for back in (*self._hand_back, *STATE.hand_back.values()):
            try:
                back()
            except Exception as second:
                state.note(f"a part of the core could not be handed back: {type(second).__name__}: {second}")
                logger.error("kvtune: a part of the core could not be handed back", exc_info=second)
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
