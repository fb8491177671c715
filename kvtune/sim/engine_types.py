"""Protocols of an EngineCore whose executor runs no model; vLLM's own types are in vllm/types.py. Types only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvtune.fake_device.cost import StepCost
from kvtune.sim.clock import VirtualClock
from kvtune.vllm import types
from kvtune.vllm.config import KVCacheSpec, VllmConfig
from kvtune.vllm.types import ModelRunnerOutput, Outputs, Request, Scheduler, SchedulerOutput


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


class TierCopies(Protocol):
    def next_end_s(self) -> float | None: ...


class Tier(Protocol):
    @property
    def copies(self) -> TierCopies: ...
    def quiet(self, connector: object) -> bool: ...


class Executor(types.Executor, Protocol):
    """A SimExecutor, or in tests a real executor on virtual time."""

    execute_model: Callable[..., PendingOutput]
    requests: dict[str, Request]
    on_step: Callable[..., None] | None  # takes a steps.ExecutedStep
    get_kv_cache_specs: Callable[[], list[dict[str, KVCacheSpec]]]
    tier: Tier | None

    @property
    def machine(self) -> Machine: ...


class EngineCore(Protocol):
    """vLLM's EngineCore with a SimExecutor."""

    scheduler: Scheduler  # the core's subclasses have more: fast/steady_path.py
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
