"""What kvtune keeps for a whole process of vLLM: `STATE`, the one object of kvtune/ that functions change.

tests/test_state.py finds any other. Imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtune.plugin.vllm.patches import Patches


class PluginState:
    """This process's patches of vLLM, and what its plugins have loaded, turned off and recorded."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.deferred: Any = None
        """lab/as_if's Finder of modules that are imported when they are needed; None in most processes."""
        self.hand_back: dict[str, Callable[[], None]] = {}
        """How parts that are on in the whole process are turned off: the first breaker that trips does so, too."""
        self.reset()

    def reset(self) -> None:
        """Undo all patches and forget the rest, for an engine of other settings and for tests."""
        for part in (*self.hand_back, *(patch.part for patch in self.patches.installed())):
            self.remove(part)
        self.loaded: set[str] = set()
        """Parts that are installed once."""
        self.core = ""
        """The core that a simulator has loaded, as JSON."""
        self.workers = True
        """Whether a worker may run here. Else none's module is imported for patches: that takes as long as a replay."""
        self.books: Any = None
        """kvtune.plugin.core.state.Books in use; None before the first."""
        self.outputs_are_encoded = False
        """Whether EngineCore sends its outputs to another process, since its loop has begun."""
        self.failed: set[str] = set()
        """Switches of the garbage collector that are off after an error."""
        self.frozen = False
        """Whether kvtune froze the heap."""
        self.instruments: Any = None
        """plugin/probe's Instruments; in a forked child those of its parent until it starts its own."""
        self.recorded_by = 0
        """The process id whose recorder is registered: a fork registers its own."""
        self.platform: Any = None
        """kvtune.data.platforms.Platform that vLLM was made to run on."""
        self.asked: dict[str, None] = {}
        """What vLLM asked of stand-ins and nobody here knows, in order."""

    def remove(self, part: str) -> None:
        """Take back what a part of kvtune has changed in this process."""
        self.hand_back.pop(part, lambda: None)()
        self.patches.undo(part)


STATE = PluginState()
