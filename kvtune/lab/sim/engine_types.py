"""Protocols of an EngineCore whose executor runs no model; vLLM's own types are in plugin/vllm/types.py. Types only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvtune.lab.device.cost import StepCost
from kvtune.lab.sim.clock import VirtualClock
from kvtune.plugin.vllm.types import (
    KVCacheSpec,
    ModelRunnerOutput,
    Outputs,
    Request,
    Scheduler,
    SchedulerOutput,
    VllmConfig,
)

if TYPE_CHECKING:
    from kvtune.lab.device.tier import Tier


class Machine(Protocol):
    @property
    def clock(self) -> VirtualClock: ...
    @property
    def cost(self) -> StepCost: ...


class PendingOutput(Protocol):
    """A future of a step's output, done at virtual time `end_s`, which fast steppers change while it is in flight."""

    end_s: float
    value: ModelRunnerOutput

    def result(self, timeout: float | None = None) -> ModelRunnerOutput: ...


class Executor(Protocol):
    """A SimExecutor, or in tests a real executor on virtual time."""

    requests: dict[str, Request]
    on_step: Callable[..., None] | None  # takes a steps.ExecutedStep
    get_kv_cache_specs: Callable[[], list[dict[str, KVCacheSpec]]]
    tier: Tier | None

    @property
    def machine(self) -> Machine: ...


class EngineCore(Protocol):
    """vLLM's EngineCore with a SimExecutor."""

    scheduler: Scheduler  # the core's subclasses have more: fast/scheduler.py
    model_executor: Executor
    vllm_config: VllmConfig
    batch_queue: deque[tuple[PendingOutput, SchedulerOutput, PendingOutput]] | None
    """Batches in flight, newest first; None with synchronous scheduling."""
    batch_queue_size: int

    @property
    def step_fn(self) -> Callable[[], tuple[Outputs | None, bool]]: ...
    def post_step(self, model_executed: bool) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def reset_prefix_cache(self) -> bool: ...


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
