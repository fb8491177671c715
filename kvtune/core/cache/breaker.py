"""What happens at the first error in the core's bookkeeping of the pool: all of it goes back to stock. EngineCore.

Contract: an order of eviction that raises or answers nonsense, queues that contradict the reference counts and windows
that cannot be computed never reach the engine. Blocks are evicted oldest first from then on, window groups
are stock's, and one note says why. The core's parts do not come back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtune.core import state

logger = logging.getLogger("vllm.kvtune")


class Breaker:
    """One for each KV cache manager; an EngineCore has one. `hand_back` has a function of each part that
    leaves all further decisions to stock. They are called in the middle of any of the parts' methods.
    """

    def __init__(self, *hand_back: Callable[[], None]) -> None:
        self.hand_back = [*hand_back]
        self.tripped = False

    def trip(self, error: Exception) -> None:
        """Hand everything back to stock. A second call does nothing."""
        if self.tripped:
            return
        self.tripped = True
        for back in self.hand_back:
            back()
        state.part("pinning", False)
        state.part("pool", False, f"stock's from here on: {error!r}")
        logger.error("kvtune: the pool is stock's from here on", exc_info=error)
