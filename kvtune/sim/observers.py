"""What can watch a replay: observers of the engine, and reports of its progress. Plain types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtune.sim.engine_types import EngineCore
from kvtune.vllm.types import Outputs, Request


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How much of a replay is done: requests, and seconds of its clock and of ours."""

    finished: int
    requests: int
    virtual_s: float
    elapsed_s: float


class Observer(Protocol):
    """Watches a replay and must not change anything. `index` is a request's place in the workload."""

    needs_single_steps: bool
    """Whether `stepped` has to be called for each step; else many steps may be taken at once."""

    def started(self, engine: EngineCore) -> None:
        """Called when EngineCore is built and nothing has been sent."""

    def sent(self, index: int, request: Request) -> None:
        """Called with vLLM's Request before the scheduler has it."""

    def stepped(self, engine: EngineCore, outputs: Outputs | None) -> None:
        """Called after one or more steps, with the `outputs` that EngineCore returned."""

    def finished(self, index: int) -> None:
        """Called when the request has its last token."""
