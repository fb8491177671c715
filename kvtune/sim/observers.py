"""Types for watching a replay: observers of the engine, and progress reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtune.sim.engine_types import EngineCore
from kvtune.vllm.types import Outputs, Request


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a replay is: requests finished, and seconds passed on the virtual clock and in real time."""

    finished: int
    requests: int
    virtual_s: float
    elapsed_s: float


class Observer(Protocol):
    """Watches a replay and must not change anything. `index`: a request's position in the workload."""

    needs_single_steps: bool
    """Whether `stepped` must be called after each single step; if False, it may be called after many."""

    def started(self, engine: EngineCore) -> None:
        """Called after EngineCore is built and before the first request is sent."""

    def sent(self, index: int, request: Request) -> None:
        """Called with vLLM's Request before the scheduler gets it."""

    def stepped(self, engine: EngineCore, outputs: Outputs | None) -> None:
        """Called after one or more steps, with the `outputs` that EngineCore returned."""

    def finished(self, index: int) -> None:
        """Called when a request has got its last token."""
